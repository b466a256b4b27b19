"""Everything about a request that can be known before it runs: refused here, or able to run to its end."""

from __future__ import annotations

import secrets
from dataclasses import replace

from astrai_runtime.attention._select import required_backend
from astrai_runtime.errors import BackendRefused, CapacityExceeded, ContextLengthExceeded, InvalidRequest
from astrai_runtime.provider.base import Provider
from astrai_runtime.request import Prompt
from astrai_runtime.sampling._pipeline import Sampler
from astrai_runtime.sequence import Sequence
from astrai_runtime.stream import Stream
from astrai_runtime.text.decoder import TextDecoder


def accept(prompt: Prompt, provider: Provider, sampler: Sampler, stream: Stream) -> Sequence:
    """The sequence that will answer `prompt` into `stream`, with a fresh seed when the request has none.

    Raises:
        InvalidRequest: a sampling parameter, token id or stop string that cannot be honoured (`param` names it).
        ContextLengthExceeded, CapacityExceeded: it could never be held.
        BackendRefused: it requires an attention backend that this deployment does not run.
    """
    if not prompt.token_ids:
        raise InvalidRequest("the prompt is empty: it needs at least one token")
    vocabulary = provider.info.vocab_size
    for token in prompt.token_ids:
        if not 0 <= token < vocabulary:
            raise InvalidRequest(f"token {token} does not exist; this model's tokens are 0 to {vocabulary - 1}")
    if refusal := sampler.refuses(prompt.sampling):
        field, reason = refusal
        raise InvalidRequest(f"{field}: {reason}", param=f"/{field}")
    backend = prompt.backend or required_backend()
    if backend is not None and backend not in provider.backends:
        there = ", ".join(sorted(provider.backends)) or "none"
        raise BackendRefused(f"attention: '{backend}' was required, but this deployment runs: {there}")
    max_tokens = _max_tokens(prompt, provider)
    seed = secrets.randbits(63) if prompt.sampling.seed is None else prompt.sampling.seed
    prompt = replace(prompt, sampling=replace(prompt.sampling, seed=seed), backend=backend)
    decoder = TextDecoder(provider.tokenizer, prompt.limits.stop, trim_leading_space=prompt.trim_leading_space)
    return Sequence(prompt, stream, decoder, max_tokens)


def _max_tokens(prompt: Prompt, provider: Provider) -> int:
    """How many tokens may be generated: as many as were asked for, or what there is room for when nobody said."""
    used, context, asked = len(prompt.token_ids), provider.info.context, prompt.limits.max_tokens
    if asked is not None and asked < 1:
        raise InvalidRequest(f"max_tokens must be at least 1, not {asked}", param="/max_tokens")
    if used + (asked or 1) > context:
        raise ContextLengthExceeded(used + (asked or 1), context)
    granted = asked or min(prompt.limits.default_max_tokens or context, context - used)
    reason = provider.kv.refuses(used + granted)
    if reason is not None and asked is None:
        granted = max(1, min(granted, provider.kv.shape.n_tokens - used))
        reason = provider.kv.refuses(used + granted)
    if reason is not None:
        raise CapacityExceeded(f"this request can never be held: {reason}")
    return granted
