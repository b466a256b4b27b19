"""Who computes is one override: what each provider's plan says, and what is refused before anything is loaded."""

from __future__ import annotations

import json

import pytest

from astrai_deploy.build import open_engine
from astrai_deploy.compose import compose
from astrai_deploy.plan import Plan, make_plan
from tests.live import serving

FAR = ("provider=remote", "provider.url=http://127.0.0.1:9/v1")


def plan(*overrides: str) -> Plan:
    return make_plan(compose(overrides))


@pytest.mark.parametrize("base", ["tiny", "chat_paged", "chat_contiguous"])
def test_mock_takes_any_model_cards_place_and_opens_no_file(base: str) -> None:
    made = plan(f"+recipe={base}", "provider=mock", "run.cache=/nowhere")
    assert made.fits
    assert (made.memory.weights, made.memory.loading, made.headers.n_parameters) == (0, 0, 0)
    assert made.memory.serving - made.memory.overhead < 64 << 20
    assert made.context == made.deployment.model.context
    assert not made.relays


def test_mock_accounts_for_the_pool_that_it_has() -> None:
    made = plan("+recipe=mock", "model.context=64")
    with open_engine("+recipe=mock", "model.context=64") as engine:
        assert engine.kv_stats().total == made.kv_shape.n_tokens == 64 * 8
        assert engine.info.context == 64
    assert made.memory.kv == made.kv_shape.n_tokens * 8


def test_remote_holds_nothing_of_the_model() -> None:
    made = plan("+recipe=tiny", *FAR, "model.context=auto")
    memory = made.memory
    assert (memory.weights, memory.kv, memory.tables, memory.activations) == (0, 0, 0, 0)
    assert (made.relays, made.known_context) == (True, 0)
    assert {each.key for each in made.decisions} == {"machine", "model.context"}


def test_plan_says_where_the_answers_come_from(ask) -> None:
    far = ask("plan", "+recipe=remote", "provider.url=http://127.0.0.1:9/v1", "model.name=far")
    said = " ".join((far.out + far.err).split())
    assert far.code == 0
    assert "another service answers: http://127.0.0.1:9/v1" in said
    assert "context as large as the other service's" in said
    assert "KV " not in said.replace("KV pool", "")
    mock = json.loads(ask("plan", "+recipe=mock", "--json").out)
    assert mock["provider"] == {"kind": "mock", "answers": "logits"}
    assert (mock["model"]["parameters"], mock["model"]["layers"], mock["memory"]["weights"]) == (0, 0, 0)


def test_unknown_provider_is_refused_with_the_list(ask) -> None:
    answer = ask("plan", "+recipe=tiny", "provider=cuda")
    assert answer.code == 2
    assert "no provider named 'cuda'; there are: local, mock, remote" in answer.err


def test_local_needs_a_model_with_files(ask) -> None:
    answer = ask("plan", "+recipe=mock", "provider=local")
    assert answer.code == 2
    assert "choose provider=mock or provider=remote, or a model with files" in answer.err


def test_providers_without_files_have_nothing_to_fetch(ask) -> None:
    answer = ask("fetch", "+recipe=mock")
    assert (answer.code, "needs no files" in answer.err) == (0, True)


def test_upstream_key_comes_from_the_environment_and_is_never_printed(ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASTRAI_UPSTREAM_API_KEY", "hush-hush")
    asked = ("+recipe=remote", "provider.url=http://127.0.0.1:9/v1", "model.name=far")
    for verb in (("plan",), ("plan", "--json"), ("config",), ("config", "--json")):
        answer = ask(verb[0], *asked, *verb[1:])
        assert answer.code == 0, answer.err
        assert "hush" not in answer.out + answer.err
    provider = compose(asked).deployment.provider
    assert provider.api_key.get_secret_value() == "hush-hush"  # type: ignore[attr-defined]
    assert "hush" not in repr(provider)


@pytest.mark.parametrize("bad", ["ftp://x/v1", "http://me:secret@x/v1", "nonsense"])
def test_bad_upstream_addresses_are_configuration_errors(ask, bad: str) -> None:
    answer = ask("plan", "+recipe=tiny", "provider=remote", f"provider.url={bad}")
    assert answer.code == 2
    assert "provider.url" in answer.err


def test_unreachable_upstream_ends_the_start_with_its_reason(launch) -> None:
    process = launch("serve", "+recipe=tiny", *FAR, "server.port=0")
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (1, "")
    assert "the service at http://127.0.0.1:9/v1 cannot be reached" in err
    assert "Traceback (most recent" not in err.splitlines()[-1]


def test_same_script_runs_over_every_provider_by_one_override() -> None:
    def script(*overrides: str) -> tuple[str, list[str], str]:
        with open_engine("+recipe=tiny", *overrides) as engine:
            whole = engine.generate("Hello", max_tokens=12, temperature=0)
            pieces = "".join(engine.generate("Hello", stream=True, max_tokens=12, temperature=0))
            return whole, engine.generate(["Hello", "Hello"], max_tokens=12, temperature=0), pieces

    with serving("provider=mock") as far:
        said = {
            kind: script(*more)
            for kind, more in {
                "local": (),
                "mock": ("provider=mock",),
                "remote": ("provider=remote", f"provider.url={far}/v1"),
            }.items()
        }
    for whole, both, pieces in said.values():
        assert whole == pieces
        assert both == [whole, whole]
    assert said["mock"] == said["remote"] != said["local"]
