"""Calls to one SGLang server. Runs in the engine's event loop, and in `moerl sglang check`.

Tokens go in and come out as ids; the server has no tokenizer. Every request carries its own seed, and a prefix-cache
key of the weights' version: entries of other weights are never hit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from moerl.contract.ports import RolloutRequest
from moerl.contract.trajectory import Lineage, SamplingParams
from moerl.rollout.fleet.backend import ModelFacts, TransportError, new_request_id
from moerl.rollout.fleet.endpoint import Endpoint
from moerl.rollout.segments import first_row
from moerl.rollout.sglang.bounds import AnswerBounds, read_meta
from moerl.rollout.sglang.handshake import (
    ServerFacts,
    check_model,
    check_options,
    check_patches,
    read_facts,
    read_version,
)
from moerl.rollout.sglang.http import MAX_FACTS_BYTES, SGLangHttp, decoded
from moerl.rollout.sglang.many_answers import PATH, ManyAnswers
from moerl.rollout.sglang.patches import read_patches

_PROBE = RolloutRequest(Lineage("probe", "probe", "probe"), (0,), SamplingParams(temperature=0.0), 1)


class ServerClient:
    """One server; connections are made when they are needed.

    Attributes:
        http: for other calls.
    """

    def __init__(
        self, endpoint: Endpoint, *, max_connections: int, timeout_seconds: float, control_seconds: float
    ) -> None:
        """Connects to nothing yet.

        Args:
            timeout_seconds: longest time from asking for a response to having it.
            control_seconds: longest time of other calls.
        """
        self.http = SGLangHttp(endpoint, max_connections=max_connections, timeout_seconds=control_seconds)
        self._answers = ManyAnswers(self.http, timeout_seconds)

    async def facts(self, model: ModelFacts | None) -> ServerFacts:
        """Makes the handshake: returns what the server is, after checks against this version's patches and `model`, if
        it is given.

        Raises:
            EngineError: it cannot be reached, or something is missing; the message names it.
        """
        info = await self.http.get("/server_info")
        weights = await self.http.get("/model_info")
        facts = read_facts(info, str(weights.get("weight_version")))
        check_patches(facts, read_patches(facts.version).fingerprint)
        check_options(facts)
        if model is not None:
            check_model(facts, model.spec, model.moe_layers)
        return facts

    async def policy_version(self) -> int:
        """Asks once for the version of the server's weights; returns -1 if it says that they have none.

        Raises:
            EngineError: no answer in time, or no version.
        """
        return read_version(str((await self.http.get_once("/model_info")).get("weight_version")))

    async def ask(self, body: Mapping[str, Any], bounds: AnswerBounds) -> dict[str, Any]:
        """Returns the `meta_info` of the answer to one attempt.

        Raises:
            TransportError: there is no whole answer; another attempt may succeed.
            EngineError: the server refused the request.
        """
        content = await self._answers.ask(body, bounds.response_bytes)
        meta = decoded(PATH, content, lambda content: read_meta(content, bounds))
        if meta.get("id") != body["rid"]:
            raise TransportError(
                f"SGLang {PATH}: an answer to another request", seen=meta.get("id"), expected=body["rid"]
            )
        return meta

    async def probe(self) -> None:
        """Has one token sampled: a server whose scheduler hangs answers health checks all the same.

        Raises:
            TransportError: no token came in time.
            EngineError: the server refused.
        """
        body = request_body(_PROBE, new_request_id("probe"), -1)
        await self.http.post_once("/generate", body, MAX_FACTS_BYTES)

    async def abort(self, request_id: str) -> None:
        """Has a request answered with what it has; one that is not there is no error."""
        await self.http.admin("/abort_request", {"rid": request_id})

    async def close(self) -> None:
        await self._answers.close()
        await self.http.close()


def request_body(
    request: RolloutRequest, request_id: str, policy_version: int, sampled_ids: Sequence[int] = ()
) -> dict[str, Any]:
    """Makes the JSON body of `/generate`, or one of those of `/generate_many`; the answer is msgpack.

    Args:
        sampled_ids: tokens of the response that are there already. The answer goes on behind them; draws depend on seed
            and position alone, and so come out as without the interruption.
    """
    sampling = request.sampling
    params: dict[str, Any] = {
        "max_new_tokens": request.max_new_tokens - len(sampled_ids),
        # The model's own end-of-sequence ids do not count, only those of the request.
        "ignore_eos": True,
        "stop_token_ids": list(request.stop_ids),
        "temperature": sampling.temperature,
        "sampling_seed": sampling.seed,
    }
    if not sampling.is_greedy:
        params |= {"top_p": sampling.top_p, "min_p": sampling.min_p, "top_k": sampling.effective_top_k or -1}
    return {
        "rid": request_id,
        "input_ids": [*request.prompt_ids, *sampled_ids],
        "sampling_params": params,
        "return_logprob": True,
        "return_routed_experts": True,
        "routed_experts_start_len": first_row(request, len(sampled_ids)),
        "return_sampling_mask": sampling.cuts,
        "compact_answer": True,
        "extra_key": f"weights-{policy_version}",
    }
