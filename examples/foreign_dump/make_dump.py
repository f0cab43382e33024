"""Samples with a sampler that is not moerl's, and writes rollouts.jsonl and the model, policy.

The sampler has a fault: it draws at temperature 0.6 and logs log-probs at temperature 1. Your own program would read
the rollouts of your system in place of `sample`; `write` is what it needs of moerl's format.
"""

import json

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

PROMPT, RESPONSE, ROLLOUTS, TEMPERATURE = 12, 24, 32, 0.6


def policy():
    """A small random model; yours is the Hugging Face directory of the weights that sampled."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=97,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        moe_intermediate_size=24,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=64,
        initializer_range=0.15,
        bos_token_id=1,
        eos_token_id=2,
    )
    return Qwen3MoeForCausalLM(config).bfloat16().eval()


@torch.no_grad()
def sample(model):
    """Tokens of all rollouts, and what the sampler says of the log-prob of each sampled one."""
    ids, logged = torch.randint(3, 97, (ROLLOUTS, PROMPT)), []
    for _ in range(RESPONSE):
        logits = model(ids).logits[:, -1].float()
        drawn = torch.multinomial(torch.softmax(logits / TEMPERATURE, -1), 1)
        logged.append(torch.log_softmax(logits, -1).gather(-1, drawn))
        ids = torch.cat([ids, drawn], -1)
    return ids.tolist(), torch.cat(logged, -1).tolist()


def write(rollouts, path):
    """A JSON object per rollout. docs/dump_formats.md lists the columns that may come with these."""
    with open(path, "w") as file:
        for token_ids, logprobs in rollouts:
            row = {
                "token_ids": token_ids,
                "response_length": len(logprobs),
                "rollout_logprobs": logprobs,
                "temperatures": TEMPERATURE,
            }
            file.write(json.dumps(row) + "\n")


model = policy()
write(zip(*sample(model), strict=True), "rollouts.jsonl")
model.save_pretrained("policy")
