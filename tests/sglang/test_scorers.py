"""A live server as a teacher, against transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from factories import FULL, NUCLEUS, make_trajectory
from transformers import AutoModelForCausalLM

from moerl.rollout.fleet.backend import ModelFacts
from moerl.rollout.sglang.server import SGLangServer
from moerl.scorers.server import ServerScorer


def test_a_server_scores_sampled_tokens_as_transformers_does(
    server: SGLangServer, model: ModelFacts, model_folder: Path, tmp_path: Path
):
    key_file = tmp_path / "key"
    key_file.touch(mode=0o600)
    key_file.write_text(server.endpoint.api_key)
    reference = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    rng = np.random.default_rng(0)
    lengths = [(4, 9), (1, 2), (30, 40)]
    rollouts = [
        make_trajectory(rng, model.spec, num_prompt=prompt, num_sampled=count, sampling=sampling)
        for (prompt, count), sampling in zip(lengths, (FULL, FULL, NUCLEUS), strict=True)
    ]
    scorer = ServerScorer(kind="server", url=server.endpoint.url, key_file=key_file).open("scorers.teacher", tmp_path)
    try:
        scorer.start()
        found = [scorer.submit(each) for each in rollouts for _ in range(2)]
        for rollout, future in zip([each for each in rollouts for _ in range(2)], found, strict=True):
            ids = torch.from_numpy(rollout.token_ids.astype(np.int64))
            with torch.inference_mode():
                logprobs = reference(ids[None]).logits[0].double().log_softmax(-1)
            wanted = logprobs[:-1].gather(1, ids[1:, None])[:, 0].numpy()
            scores = future.result(120)
            np.testing.assert_allclose(scores[rollout.sampled], wanted[rollout.sampled[1:]], atol=1e-4)
            assert not scores[~rollout.sampled].any()
    finally:
        scorer.close()
