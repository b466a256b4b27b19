"""The `model` group: which model, from where, in which precision, with how much context, and how it chats."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, PositiveInt

from astrai_runtime.part import Config, PartConfig

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Weights = Literal["auto", "float32", "bfloat16", "int8", "int4"]


class ChatConfig(Config):
    """How messages become a prompt. `template`: Jinja text, or `auto` for the one in the model's files."""

    template: str
    stop: tuple[str, ...]  # strings that end every chat answer of this model, never shown
    trim_leading_space: bool  # drop the one space that a plain dialogue template leaves before an answer


class ModelConfig(Config):
    """One model card. `source` is validated by the source that its `kind` names."""

    name: str = Field(min_length=1)  # what clients call it
    source: PartConfig
    dtype: Dtype  # of activations, and of keys and values unless kv.dtype says otherwise; auto: the plan decides
    weights: Weights  # of the matrices in memory; auto: what dtype declares, else what the files hold
    context: PositiveInt | Literal["auto"]  # tokens of one sequence, prompt and answer; auto: the model's own
    chat: ChatConfig
    overrides: dict[str, Any]  # config.json keys that replace the file's own (rope_scaling, ...)
    license: str | None
