"""Every mistake in a configuration is one line that says where, which key, which value, and what would work."""

from __future__ import annotations

import pytest

GLOBAL = "# @package _global_\n"


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("kv.page_sise=32", "command line: kv.page_sise=32: unknown key 'page_sise'; did you mean 'page_size'?"),
        ("servr.port=1", "command line: servr.port=1: servr: unknown key 'servr'; did you mean 'server'?"),
        ("model.chat.stopp=[]", "command line: model.chat.stopp=[]: unknown key 'stopp'; did you mean 'stop'?"),
        ("model.source.sede=1", "command line: model.source.sede=1: unknown key 'sede'; did you mean 'seed'?"),
        ("protocols.openai.pth=/x", "command line: protocols.openai.pth=/x: unknown key 'pth'; did you mean 'path'?"),
        ("machine.memry=1", "command line: machine.memry=1: unknown key 'memry'; did you mean 'memory'?"),
        ("+new=1", "command line: +new=1: new: unknown key 'new'; there are: promise, machine, model, kv,"),
        ("kv.page_size=0", "command line: kv.page_size=0: must be greater than 0 (got 0)"),
        ("kv.page_size=-1", "command line: kv.page_size=-1: must be greater than 0 (got -1)"),
        ("kv.page_size=3", "command line: kv.page_size=3: page_size must be a power of two, not 3; 2 or 4 would work"),
        ("kv.page_size=4096", "command line: kv.page_size=4096: a page of 4096 tokens is larger than model.context=2048"),
        ("kv.n_tokens=-5", "command line: kv.n_tokens=-5: must be greater than 0 or 'auto' (got -5)"),
        ("kv.n_tokens=15", "command line: kv.n_tokens=15: n_tokens must be "),
        ("scheduler.max_batch_size=0", "command line: scheduler.max_batch_size=0: "),
        ("scheduler.max_waiting=-1", "command line: scheduler.max_waiting=-1: "),
        ("server.port=65536", "command line: server.port=65536: must be less than or equal to 65535 (got 65536)"),
        ("server.port=yes", "command line: server.port=yes: must be a valid integer (got 'yes')"),
        ("sampling.top_k=true", "command line: sampling.top_k=true: must be a number (got true)"),
        ("sampling.temperature=.nan", "command line: sampling.temperature=.nan: "),
        ("run.log_level=Info", "must be 'DEBUG', 'INFO', 'WARNING' or 'ERROR' (got 'Info'); did you mean 'INFO'?"),
        ("attention.priority=[flsh]", "attention.priority[0]: no attention backend named 'flsh'; there are: "),
        ("attention.priority=[]", "command line: attention.priority=[]: "),
        ("sampling.pipeline=[top_k,topp]", "sampling.pipeline[1]: no sampling stage named 'topp'; there are: "),
        ("sampling.pipeline=[top_k,temperature,top_k]", "sampling.pipeline[2]: 'top_k' is listed twice"),
        ("sampling.extra.foo=1", "command line: sampling.extra.foo=1: no stage of sampling.pipeline obeys 'foo'"),
        ("sampling.extra.typical_p=2", "sampling.extra.typical_p=2: must be between 0 and 1 (got 2)"),
        ("sampling.extra.mirostat=1", "sampling.extra.mirostat=1: must be 0 or 2 (got 1)"),
        ("sampling.logprobs_mode=row", "sampling.logprobs_mode=row: must be 'raw' or 'filtered'"),
        ("protocols.anthropic.path=/v1/chat/completions", "'/v1/chat/completions' is taken by protocols.openai"),
        ("protocols.openai.completions_path=/v1/chat/completions", "'/v1/chat/completions' is taken by protocols.openai"),
        ("protocols.anthropic.path=/tokenize", "'/tokenize' is taken by the service itself"),
        ("agents.bob.kind=bot", "command line: agents.bob.kind=bot: no agents named 'bot'; there are: "),
        ("kv=pagd", "command line: kv=pagd: no kv named 'pagd'; there are: contiguous, paged; did you mean 'paged'?"),
        ("recipe=tinny", "command line: recipe=tinny: no recipe named 'tinny'; there are: "),
        ("kv=null", "command line: kv=null: a group cannot be null; name an option"),
        ("kv=[paged,contiguous]", "command line: kv=[paged,contiguous]: takes one choice, not a list"),
        ("kv=paged,contiguous", "command line: kv=paged,contiguous: several values are a sweep: add -m"),
        ("kv.kind=pagd", "command line: kv.kind=pagd: no kv named 'pagd'; there are: contiguous, paged"),
        ("kv.page_size={a", "command line: kv.page_size={a: this value is not valid here; quote it"),
        ("hydra.run.dir=/tmp/x", "command line: hydra.run.dir=/tmp/x: Hydra's own settings go with Hydra's own flags"),
        ("model.overrides._target_=os.system", "YAML names parts by their kind, never code; remove this key"),
        ("model.name=???", "command line: model.name=???: no value given (it is ???)"),
        ("model.name=${no.such}", "command line: model.name=${no.such}: '${no.such}' cannot be resolved"),
        ("model.name=${oc.env:ASTRAI_NOT_SET}", "the environment variable 'ASTRAI_NOT_SET' is not set; set it, or write"),
        ("model.name=${model.name}", "command line: model.name=${model.name}: '${model.name}' refers to itself"),
    ],
)
def test_one_mistake_is_one_line(ask, override: str, expected: str) -> None:
    answer = ask("config", "+recipe=tiny", override)
    assert answer.code == 2
    assert answer.out == ""
    assert [line for line in answer.errors if expected in line], answer.err
    assert len(answer.errors) == 1, answer.err


def test_all_mistakes_are_told_at_once(ask) -> None:
    answer = ask(
        "config",
        "recipe=tiny",
        "kv.page_sise=3",
        "server.port=-1",
        "model.name=???",
        "attention.priority=[x]",
        "run.dir=${a}",
    )
    assert answer.code == 2
    for key in ("kv.page_sise=3", "server.port=-1", "model.name=???", "attention.priority=[x]", "run.dir=${a}"):
        assert sum(line.startswith(f"command line: {key}: ") for line in answer.errors) == 1, answer.err


def test_key_of_another_kind_names_both_places(ask) -> None:
    answer = ask("config", "+recipe=tiny", "kv=contiguous", "kv.page_size=8")
    assert answer.errors == [
        "command line: kv.page_size=8: 'page_size' belongs to kv.kind=paged, "
        "but kv.kind is 'contiguous' (conf/kv/contiguous.yaml:2:1)"
    ]


def test_mistakes_in_a_recipe_have_line_and_column(ask, write) -> None:
    write(
        "recipes/bad.yaml",
        f"{GLOBAL}defaults:\n  - tiny\n  - _self_\npromise: none\nkv:\n  page_sise: 4\n  n_tokens: -5\nsampling:\n"
        "  pipeline: [temperature, topk]\n  top_k: 0\n",
    )
    answer = ask("config", "--config-dir", "mine", "+recipe=bad")
    assert answer.code == 2
    assert answer.errors == [
        "mine/recipes/bad.yaml:8:3: kv.n_tokens: must be greater than 0 or 'auto' (got -5)",
        "mine/recipes/bad.yaml:7:3: kv.page_sise: unknown key 'page_sise'; did you mean 'page_size'?",
        "mine/recipes/bad.yaml:10:27: sampling.pipeline[1]: no sampling stage named 'topk'; there are: "
        "logit_bias, min_p, mirostat, penalties, temperature, top_k, top_p, typical_p; did you mean 'top_k'?",
    ]


def test_sampling_default_without_its_stage_is_refused_but_greedy_needs_none(ask) -> None:
    answer = ask("config", "recipe=tiny", "sampling.pipeline=[]", "sampling.temperature=0", "sampling.top_k=7")
    assert answer.errors == [
        "command line: sampling.top_k=7: 7 has no effect: sampling.pipeline lacks 'top_k'; add it, or set 0"
    ]


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        (
            "recipes/x.yaml",
            "promise: no header\n",
            "mine/recipes/x.yaml:1:1: the first line of a recipe must be '# @package",
        ),
        ("recipes/x.yaml", f"# licence\n{GLOBAL}promise: late\n", "mine/recipes/x.yaml:1:1: the first line of a recipe"),
        (
            "recipes/x.yaml",
            f"{GLOBAL}hydra:\n  run: {{dir: /tmp}}\n",
            "mine/recipes/x.yaml:2:1: hydra: a recipe or a file of",
        ),
        (
            "recipes/x.yaml",
            f"{GLOBAL}defaults:\n  - override /hydra/job_logging: default\n",
            "mine/recipes/x.yaml:3:5: defaults[0].override /hydra/job_logging: a recipe or a file of yours cannot change",
        ),
        (
            "recipes/x.yaml",
            f"{GLOBAL}model: {{overrides: {{_target_: os.system}}}}\n",
            "mine/recipes/x.yaml:2:21: model.overrides._target_: YAML names parts by their kind, never code",
        ),
        (
            "recipes/x.yaml",
            f"{GLOBAL}model:\n  name: ${{oc.env:AWS_SECRET_ACCESS_KEY}}\n",
            "mine/recipes/x.yaml:3:3: model.name: the environment variable 'AWS_SECRET_ACCESS_KEY' is not for this file",
        ),
        (
            "recipes/x.yaml",
            f"{GLOBAL}model:\n  name: ${{oc.decode:${{run.dir}}}}\n",
            "mine/recipes/x.yaml:3:3: model.name: a file of yours may use ${key} and ${oc.env:NAME,default}, and nothing",
        ),
        (
            "recipes/x.yaml",
            f"{GLOBAL}model:\n  name: ${{oc.decode:${{oc.env:ASTRAI_X,'\\${{oc.env:PATH}}'}}}}\n",
            "mine/recipes/x.yaml:3:3: model.name: a file of yours may use ${key}",
        ),
        (
            "recipes/x.yaml",
            f"{GLOBAL}model:\n  name: ${{oc.env:HF_TOKEN}}\n",
            "mine/recipes/x.yaml:3:3: model.name: the environment variable 'HF_TOKEN' is not for this file to read",
        ),
        (
            "recipes/x.yaml",
            f"{GLOBAL}a: oc.env\nmodel:\n  name: ${{${{a}}:PATH}}\n",
            "mine/recipes/x.yaml:4:3: model.name: a file of yours may use ${key}",
        ),
        (
            "recipes/x.yaml",
            f"{GLOBAL}model:\n  name: ${{oc.env:ASTRAI_X,${{oc.env:PATH}}}}\n",
            "mine/recipes/x.yaml:3:3: model.name: the environment variable 'PATH' is not for this file to read",
        ),
        (
            "recipes/x.yaml",
            f"{GLOBAL}model:\n  name: \\\\${{oc.env:PATH}}\n",
            "mine/recipes/x.yaml:3:3: model.name: the environment variable 'PATH' is not for this file to read",
        ),
        (
            "recipes/x.yaml",
            f"{GLOBAL}model:\n  name: !!python/object/apply:os.system [ls]\n",
            "mine/recipes/x.yaml:3:3: model.name: YAML tags such as tag:yaml.org,2002:python/object/apply:os",
        ),
        ("recipes/x.yaml", f"{GLOBAL}a: &a [*a]\n", "mine/recipes/x.yaml: too large or too deep"),
        ("recipes/x.yaml", f"{GLOBAL}defaults: [x]\n", "recipes or options extend each other in a circle"),
        (
            "recipes/x.yaml",
            f"{GLOBAL}defaults: [tiny, _self_]\nkv: [1]\n",
            "mine/recipes/x.yaml:3:1: kv: a list cannot take the place of a mapping (conf/kv/paged.yaml:1:1)",
        ),
        (
            "recipes/x.yaml",
            f"{GLOBAL}defaults: [tiny, _self_]\nsampling:\n  pipeline: {{a: 1}}\n",
            "mine/recipes/x.yaml:4:3: sampling.pipeline: a mapping cannot take the place of a list (conf/sampling",
        ),
        ("recipes/x.yaml", f"{GLOBAL}defaults:\n  - override /nope: x\n", "mine/recipes/x.yaml: Could not override 'nope'"),
        (
            "recipes/x.yaml",
            f"{GLOBAL}server:\n  host: pa${{ss\n",
            "mine/recipes/x.yaml:3:3: server.host: 'pa${ss' is not a valid interpolation; a literal ${ is written \\${",
        ),
        ("recipes/x.yaml", f"{GLOBAL}kv: [\n", "mine/recipes/x.yaml:3:1: this is not YAML: "),
        (
            "recipes/x.yaml",
            f"{GLOBAL}kv:\n  a: 1\n  a: 2\n",
            "mine/recipes/x.yaml:4:3: kv.a: this key is written twice in one file; keep one",
        ),
        ("recipes/x.yaml", f"{GLOBAL}- a\n", "mine/recipes/x.yaml:2:1: a configuration file holds keys and values"),
        (
            "recipes/x.yaml",
            f"{GLOBAL}defaults:\n  - override /kv: pagd\n",
            "mine/recipes/x.yaml:3:5: kv: no kv named 'pagd'; there are: contiguous, paged; did you mean 'paged'?",
        ),
        (
            "recipes/x.yaml",
            f"{GLOBAL}defaults:\n  - tiny\nserver:\n  open: ???\n",
            "mine/recipes/x.yaml:5:3: server.open: no value given",
        ),
    ],
)
def test_what_a_file_must_not_say_is_told_with_its_place(ask, write, name: str, text: str, expected: str) -> None:
    write(name, text)
    answer = ask("config", "--config-dir=mine", "+recipe=x")
    assert answer.code == 2
    assert expected in answer.err
    assert "Traceback" not in answer.err
    assert len(answer.errors) <= 1, answer.err


def test_variables_that_are_meant_for_us_may_be_read(ask, write, monkeypatch: pytest.MonkeyPatch) -> None:
    write(
        "recipes/x.yaml", f"{GLOBAL}defaults: [tiny]\nmodel:\n  name: ${{oc.env:ASTRAI_NAME}}-${{oc.env:ASTRAI_SIZE,1b}}\n"
    )
    monkeypatch.setenv("ASTRAI_NAME", "mine")
    assert ask("config", "--why", "model.name", "--config-dir", "mine", "+recipe=x").out.startswith("mine-1b  ")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["plann"], "there is no verb 'plann'; there are: serve, plan, config, chat, fetch, kernels; did you mean 'plan'?"),
        (["plan", "--jsn"], "there is no flag '--jsn'; --help lists them; did you mean '--json'?"),
        (["config", "--why"], "--why needs a value"),
        (["plan", "--why", "kv"], "--why goes with the verb config"),
        (["chat", "--json"], "--json goes with the verbs plan and config"),
        (["config", "tiny"], "command line: tiny: this is not key=value"),
        (["config", "--config-dir", "nowhere"], "--config-dir nowhere: there is no such folder"),
        (["config", "--why", "kv.pagesize", "+recipe=tiny"], "there is no key 'kv.pagesize'; did you mean 'kv.page_size'?"),
        (["--resolve", "-m"], "--resolve goes with --cfg"),
    ],
)
def test_mistakes_in_verbs_and_flags_exit_2(ask, arguments: list[str], expected: str) -> None:
    answer = ask(*arguments)
    assert answer.code == 2
    assert expected in answer.err


def test_crash_is_one_line_with_a_hint(ask, monkeypatch: pytest.MonkeyPatch) -> None:
    from astrai_deploy import report

    def broken(_: object) -> str:
        raise RuntimeError("first\nsecond")

    monkeypatch.setattr(report, "config_yaml", broken)
    answer = ask("config", "+recipe=tiny")
    assert answer.code == 1
    assert answer.err == "astrai-deploy: RuntimeError: first second; --debug shows where\n"
    assert "Traceback" in ask("config", "+recipe=tiny", "--debug").err


def test_interrupt_exits_130(ask, monkeypatch: pytest.MonkeyPatch) -> None:
    from astrai_deploy import report

    def interrupted(_: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(report, "config_yaml", interrupted)
    assert ask("config", "+recipe=tiny").code == 130


@pytest.mark.parametrize("host", ["0.0.0.0", "example.org"])
def test_listening_to_strangers_needs_a_key_or_a_word(ask, host: str) -> None:
    refused = ask("config", "+recipe=tiny", f"server.host='{host}'")
    assert refused.code == 2
    (line,) = refused.errors
    for word in (f"'{host}'", "server.api_keys", "server.api_key_file", "127.0.0.1", "server.allow_open=true"):
        assert word in line
    for opened in ("server.api_keys=[a-key]", "server.api_key_file=/run/secrets/keys", "server.allow_open=true"):
        assert ask("config", "+recipe=tiny", f"server.host='{host}'", opened).code == 0
    assert ask("config", "+recipe=tiny", f"server.host='{host}'", "server.admin_keys=[a-key]").code == 2


def test_loopback_needs_no_key(ask) -> None:
    for host in ("::1", "localhost"):
        assert ask("config", "+recipe=tiny", f"server.host='{host}'").code == 0


@pytest.mark.parametrize("name", ["api_keys", "admin_keys"])
def test_a_key_that_is_refused_is_not_repeated(ask, name: str) -> None:
    for typed in (f"server.{name}=['two s3crets']", f"server.{name}=s3crets", f"server.{name}=[s3crets,'']"):
        answer = ask("config", "+recipe=tiny", typed)
        assert answer.code == 2
        assert "s3crets" not in answer.out + answer.err
    shown = ask("config", "+recipe=tiny", f"server.{name}=[s3crets]")
    assert (shown.code, "s3crets" in shown.out) == (0, False)
