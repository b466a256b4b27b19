"""The comparison's arithmetic, its pieces against real processes and sockets, and a whole tiny run against itself."""

from __future__ import annotations

import asyncio
import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
BENCH = ROOT / "bench"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The scripts of bench/ by name."""
    monkeypatch.syspath_prepend(str(BENCH))

    class Scripts:
        def __getattr__(self, name: str) -> ModuleType:
            return importlib.import_module(name)

    return Scripts()


def test_ratios_compare_within_a_round_and_turn_times_round(bench: Any) -> None:
    results, work = bench._results.Results(), bench._work.Work("http", 8, prefix="shared")
    # The machine is twice as fast in the second round: medians over rounds would mix that in.
    for turn, speed in enumerate((1.0, 2.0, 1.0)):
        results.note(work, "astrai-deploy", turn, {"tok_s": 300 * speed, "ttft_ms": 10 / speed})
        if turn < 2:
            results.note(work, "other", turn, {"tok_s": 100 * speed, "ttft_ms": 50 / speed})
    assert results.ratio(work.key, "tok_s", "other") == pytest.approx(3)
    assert results.ratio(work.key, "ttft_ms", "other") == pytest.approx(5)
    assert results.median(work.key, "tok_s", "astrai-deploy") == 300
    assert results.ratio(work.key, "tok_s", "nobody") is None
    told = results.to_json()["works"]["http x8 shared"]
    assert told["ratios"]["ttft_ms"] == {"other": pytest.approx(5)}
    assert told["rounds"]["tok_s"]["other"] == [100, 200]
    rows = [[*column.cells] for column in results.table("t").columns]
    assert rows[2] == ["3.00x", "5.00x"]
    assert results.sides() == ["astrai-deploy", "other"]


def test_only_uninterrupted_full_steps_count_as_decoding(bench: Any) -> None:
    step = bench._steps.Step
    alone = [step(i * 1.0, 0.5, 1, 1) for i in range(3)]
    prompt = step(3.0, 0.9, 2, 40)
    both = [step(4 + i * 0.2, 0.15, 2, 2) for i in range(6)]
    found = bench._steps.decoding([*alone, prompt, *both, step(6.0, 0.1, 1, 1)], 2)
    assert found["tok_s"] == pytest.approx(2 / 0.2)
    assert found["model_tok_s"] == pytest.approx(2 / 0.15)
    assert found["around"] == pytest.approx(0.25)
    assert found["p95_ms"] == pytest.approx(200)
    with pytest.raises(ValueError, match="0 steps had 3"):
        bench._steps.decoding(both, 3)


@pytest.mark.parametrize(("share", "value"), [(0.5, 50), (0.95, 95), (1.0, 100), (0.0, 1)])
def test_percentile_is_the_nearest_rank(bench: Any, share: float, value: int) -> None:
    assert bench._steps.percentile(list(range(100, 0, -1)), share) == value


def test_steps_are_counted_for_other_processes(bench: Any, tmp_path: Path) -> None:
    recorder = bench._steps.Recorder(tmp_path / "counts")
    batch = SimpleNamespace(chunks=[SimpleNamespace(length=1)] * 3)
    recorder._note(1.0, 0.25, batch)
    recorder._note(2.0, 0.5, batch)
    assert bench._steps.read_counts(tmp_path / "counts") == (2, 0.75)
    assert recorder.steps == []


def test_groups_hold_what_was_asked_for(bench: Any) -> None:
    groups = bench._work.engine_groups(["prefill", "decode"], [1, 8], [0, 512])
    assert [[work.key for work in group] for group in groups] == [
        ["decode x1 @0", "decode x8 @0"],
        ["prefill 512", "decode x1 @512", "decode x8 @512"],
    ]
    assert [work.key for (work,) in bench._work.http_groups([1, 8], ["none", "unique"])] == [
        "http x1 none",
        "http x8 none",
        "http x1 unique",
        "http x8 unique",
    ]
    prompts = bench._work.Work("decode", 8, 512).prompts()
    assert {len(ids) for ids in prompts} == {512}
    assert len({tuple(ids) for ids in prompts}) == 8
    assert min(map(min, prompts)) >= 3
    assert max(map(max, prompts)) < 256


def test_a_tool_s_rows_are_found_among_its_chatter(bench: Any) -> None:
    row = {"pp": 512, "pl": 8, "speed_pp": 350.0, "speed_tg": 110.0}
    assert bench._sides.batched_rows(f"loading ...\n{json.dumps(row)}\n\nperf: 1 ms\n") == {8: row}


def test_busy_time_of_others_is_told_from_our_own(bench: Any) -> None:
    spin = [sys.executable, "-c", "import time; t = time.process_time()\nwhile time.process_time() - t < 0.5: pass"]

    def work() -> str:
        subprocess.run(spin, check=True)
        return "done"

    before = bench._watch.tree_ticks([bench._watch.os.getpid()])
    result, taken = bench._watch.Quiet(limit=1.0, tries=3).measure(work, [])
    own = bench._watch.tree_ticks([bench._watch.os.getpid()]) - before
    assert result == "done"
    assert len(taken) == 1  # the limit is all of the machine: nothing to repeat
    assert own >= 0.4 * bench._watch.os.sysconf("SC_CLK_TCK")  # the child's time was ours
    _, taken = bench._watch.Quiet(limit=-1.0, tries=3, patience_s=0.0).measure(lambda: None, [])
    assert len(taken) == 3  # never quiet enough


def test_a_worker_s_errors_reach_its_parent(bench: Any, tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(
        "from _lines import answer_lines\n"
        "def double(n):\n    print('chatter')\n    return 2 * n\n"
        "answer_lines(lambda: {'double': double}, lambda: {'name': 'w'})\n"
    )
    env = {"PYTHONPATH": str(BENCH)}
    remote = bench._lines.Remote([sys.executable, str(script)], tmp_path / "log", env)
    assert remote.about == {"name": "w"}
    assert remote.ask("double", n=4) == 8
    with pytest.raises(bench._lines.Refused, match="TypeError"):
        remote.ask("double", n=None)
    assert remote.ask("double", n=5) == 10
    remote.close()
    with pytest.raises(bench._lines.Refused, match="boom"):
        bench._lines.Remote([sys.executable, "-c", "raise SystemExit('boom')"], tmp_path / "log", env)


def test_bodies_are_read_line_by_line_however_they_are_chunked(bench: Any) -> None:
    async def lines(sent: bytes, chunked: bool) -> list[bytes]:
        reader = asyncio.StreamReader()
        reader.feed_data(sent)
        reader.feed_eof()
        return [line async for line in bench.side_clients.body_lines(reader, chunked)]

    chunks = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in (b"data: {", b"}\n\nda", b"ta: [DONE]\n"))
    assert asyncio.run(lines(chunks + b"0\r\n\r\n", True)) == [b"data: {}", b"", b"data: [DONE]"]
    assert asyncio.run(lines(b"data: 1\ndata: 2", False)) == [b"data: 1", b"data: 2"]


def test_many_clients_are_one_number_each(bench: Any) -> None:
    answer = bench.side_clients.Answer
    found = bench.side_clients.summary([answer(0.0, [0.1, 0.2, 0.3], 6, 50), answer(0.1, [0.4, 0.8, 1.0], 4, 60)])
    assert found["tok_s"] == pytest.approx(10)
    assert found["ttft_ms"] == pytest.approx(200)
    assert found["p50_ms"] == pytest.approx(100)
    assert found["p95_ms"] == pytest.approx(400)


def test_a_shared_prefix_is_the_same_for_all_and_a_unique_one_for_nobody(bench: Any) -> None:
    said = bench.side_clients.system_text
    assert said("none", 100, "a") == ""
    assert said("shared", 100, "a") == said("shared", 100, "b")
    assert said("unique", 100, "a") != said("unique", 100, "b")
    assert len(said("unique", 100, "a").split()) == 100


def test_bars_are_drawn_against_the_side_that_comes_closest(bench: Any, tmp_path: Path) -> None:
    works = {
        "decode x8 @0": {"ratios": {"tok_s": {"llama.cpp": 4.5, "llama-cpp-python": 4.9, "openvino": 1.6}}},
        "start": {"ratios": {"second_s": {"llama-server": 0.5}}},
    }
    run = {"model": "demo", "works": works, "rounds": 3, "cpu": "a CPU", "threads": 2, "when": "2026-01-01 00:00"}
    found = bench.plot.bars(run)
    assert [(bar.label, bar.engine, bar.times) for bar in found] == [
        ("decode, 8 streams", "llama.cpp", 4.5),
        ("decode, 8 streams", "openvino", 1.6),
        ("second start", "llama.cpp", 0.5),
    ]


def test_the_picture_is_made_from_the_numbers(bench: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    works = {"decode x8 @0": {"ratios": {"tok_s": {"llama.cpp": 4.5, "mine": 0.8}}}}
    run = {"model": "demo", "works": works, "rounds": 3, "cpu": "a CPU", "threads": 2, "when": "2026-01-01 00:00"}
    (tmp_path / "bench.json").write_text(json.dumps({"runs": [run]}))
    command = [sys.executable, str(BENCH / "plot.py"), str(tmp_path / "bench.json"), str(tmp_path / "bench.png")]
    subprocess.run(command, check=True, timeout=60)
    assert (tmp_path / "bench.png").read_bytes()[:4] == b"\x89PNG"


def test_a_random_model_is_the_same_in_both_of_its_forms(bench: Any, tmp_path: Path) -> None:
    from astrai_deploy.compose import compose
    from astrai_deploy.plan import make_plan

    models = bench.models
    shape = models.Shape("toy", 64, 96, 2, 4, 2, 16, 300, 128, eps=2.0**-20)  # GGUF keeps it in float32
    weights = models.random_weights(shape)
    models.write_folder(tmp_path / "toy", shape, weights)
    models.write_gguf(tmp_path / "toy.gguf", shape, weights)
    card = ("model=local", "model.name=toy", "machine=laptop", "attention=torch_native")
    plans = [make_plan(compose([*card, f"model.source.path={tmp_path / name}"])) for name in ("toy", "toy.gguf")]
    assert plans[0].spec == plans[1].spec
    assert plans[0].headers.n_parameters == sum(tensor.numel() for tensor in weights.values())


def test_runs_of_other_models_and_works_stay_in_the_file(bench: Any, tmp_path: Path) -> None:
    path = tmp_path / "docs" / "bench.json"

    def save(model: str, works: dict[str, int], disturbed: list[str], speed: float) -> None:
        found = [{"work": work} for work in disturbed]
        told = {"model": model, "works": works, "about": {}, "missing": {}, "disturbed": found, "memory_gb_s": [speed]}
        bench.peers.save(path, told)

    save("a", {"start": 1, "prefill 512": 1}, ["start", "prefill 512"], 45.0)
    save("b", {"start": 2}, [], 50.0)
    save("a", {"start": 3}, ["start"], 60.0)
    b, a = json.loads(path.read_text())["runs"]
    assert (b["model"], b["works"]) == ("b", {"start": 2})
    assert (a["model"], a["works"]) == ("a", {"start": 3, "prefill 512": 1})
    assert a["disturbed"] == [{"work": "prefill 512"}, {"work": "start"}]
    assert a["memory_gb_s"] == [45.0, 60.0]


def test_every_line_of_the_suite_is_understood_and_can_be_changed(bench: Any) -> None:
    parser = bench.peers.arguments()
    for line in bench.peers.SUITE:
        given, ours = parser.parse_known_args([*line.split(), "--rounds", "7", "kernels.isa=avx2"])
        assert given.rounds == 7
        assert ours == ["kernels.isa=avx2"]
        assert given.model in ("demo", "qwen-int8", "qwen-int4")
    with pytest.raises(SystemExit):
        parser.parse_known_args(["--work", "everything"])


def test_a_whole_run_beside_itself(bench: Any, home: Path, tmp_path: Path) -> None:
    told = tmp_path / "out.json"
    with bench._service.running(["+recipe=tiny", "server.max_choices=1"]) as service:
        command = [sys.executable, str(BENCH / "peers.py"), "--model", "tiny", "--work", "http", "--clients", "2"]
        command += ["--prefixes", "shared", "--rounds", "1", "--limit", "100", "--tries", "1", "--cache", str(home)]
        command += ["--url", f"self={service.url}/v1", "--out", str(told)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = json.loads(told.read_text())["runs"]
    work = run["works"]["http x2 shared"]
    assert set(work["ratios"]["tok_s"]) == {"self"}
    assert 0 < work["ratios"]["tok_s"]["self"] < 100
    assert 0 < work["medians"]["around"]["astrai-deploy"] < 1
    assert work["medians"]["tokens"] == {"astrai-deploy": 128, "self": 128}
    assert work["medians"]["prompt_tokens"]["self"] > 400
    assert len(run["memory_gb_s"]) == 2
    assert run["missing"] == {}
