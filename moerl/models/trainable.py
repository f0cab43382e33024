"""Model configs that cannot be trained: Megatron and Hugging Face would compute two different models.

Torch-free; any process. Checked on the login node for a model directory and again by every trainer rank. The rules of a
family stand in its record (`moerl.models.families`).
"""

from __future__ import annotations

from moerl.errors import ConfigError
from moerl.models.family import Config, Rule, is_rule
from moerl.models.spec import family_of


def refuse_untrainable(config: Config) -> None:
    """Refuses a config if the trainer would compute another model than the config describes.

    Args:
        config: content of a Hugging Face config.

    Raises:
        ConfigError: the family is unknown, or a setting cannot be trained; names the setting and the reason.
    """
    for rule in (*_EVERY_FAMILY, *family_of(config).rules):
        if not rule.allowed(config):
            raise ConfigError(
                f"model config ({config['model_type']}): {', '.join(rule.keys)}: {rule.reason}",
                seen={key: config.get(key) for key in rule.keys},
                expected=rule.expected,
                remedy="use another model; this one can be sampled from, not trained",
            )


def _is_block_fp8(config: Config) -> bool:
    quantised = config.get("quantization_config")
    if quantised is None:
        return True
    return quantised.get("quant_method") == "fp8" and list(quantised.get("weight_block_size") or ()) == [128, 128]


_EVERY_FAMILY = (
    is_rule("hidden_act", "silu", "silu", "the bridge builds gated SiLU layers only"),
    Rule(
        ("quantization_config",),
        _is_block_fp8,
        "none, or quant_method fp8 with weight_block_size [128, 128]",
        "weights are dequantised on load, in this format alone",
    ),
)
