"""The engine of this tree as a side: `side_ours.py OVERRIDES...`, with scheduler, sampling and detokenizing included."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "runtime")]

from _lines import answer_lines  # noqa: E402
from _steps import Recorder, decoding  # noqa: E402

from astrai_deploy.build import build  # noqa: E402
from astrai_deploy.compose import compose  # noqa: E402
from astrai_deploy.plan import make_plan  # noqa: E402
from astrai_runtime.event import Failed  # noqa: E402
from astrai_runtime.request import Limits, Prompt, SamplingParams  # noqa: E402


class Ours:
    """Answers the verbs `prefill` and `decode`. Greedy; the end token is ignored."""

    def __init__(self, overrides: list[str]) -> None:
        plan = make_plan(compose(overrides))
        if not plan.fits:
            raise SystemExit(f"it does not fit this machine: {plan.problem}")
        self._recorder = Recorder()
        self._recorder.wrap()
        built = build(plan)
        self._engine: Any = built.engine
        self._engine.start()
        declared = plan.deployment.model
        self.about = {
            "load_s": built.load_s,
            "plan_bytes": plan.memory.peak,
            "attention": dict(plan.attention),
            "dtype": plan.dtype,
            "weights": getattr(plan, "weights", getattr(declared, "weights", None)),
        }

    def verbs(self) -> Mapping[str, Callable[..., Any]]:
        return {"prefill": self.prefill, "decode": self.decode}

    def _run(self, prompts: list[list[int]], new: int) -> None:
        sampling, limits = SamplingParams(temperature=0), Limits(max_tokens=new, ignore_eos=True)
        for stream in [self._engine.submit(Prompt(tuple(ids), sampling, limits)) for ids in prompts]:
            for event in stream.events():
                if isinstance(event, Failed):
                    raise event.error

    def prefill(self, ids: list[int]) -> dict[str, float]:
        """Prompt tokens a second of one prompt, from its first step's beginning to its last step's end."""
        self._recorder.clear()
        self._run([ids], 1)
        steps = self._recorder.steps
        computed = sum(step.tokens for step in steps)
        if computed != len(ids):
            raise RuntimeError(f"{computed} tokens were computed, not {len(ids)}: the rest was cached")
        return {"tok_s": computed / (steps[-1].began + steps[-1].lasted - steps[0].began)}

    def decode(self, prompts: list[list[int]], new: int) -> dict[str, Any]:
        """One token for each prompt first: their pages are cached, and all begin to decode in the same step."""
        if len(prompts[0]) > 32:
            self._run(prompts, 1)
        self._recorder.clear()
        self._run(prompts, new)
        return decoding(self._recorder.steps, len(prompts))


if __name__ == "__main__":
    side: list[Ours] = []

    def start() -> Mapping[str, Callable[..., Any]]:
        side.append(Ours(sys.argv[1:]))
        return side[0].verbs()

    answer_lines(start, lambda: side[0].about)
