"""Stands in for `sgl_kernel` where there is no GPU.

The `sglang-kernel` wheel holds CUDA libraries only. Without `torch.ops.sgl_kernel.convert_weight_packed` SGLang falls
back to torch-native code on CPU; it still imports names from here, and calls the one function defined below.
"""

__version__ = "0.0.0+cpu.standin"


def assign_req_to_token_pool_cpu(req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc, stride):
    """Writes each request's new cache places into its row of the token table."""
    taken = 0
    for row, start, end in zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True):
        places = out_cache_loc[taken : taken + end - start]
        req_to_token[row, start:end] = places.to(req_to_token.dtype)
        taken += end - start


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def kernel(*args, **kwargs):
        raise RuntimeError(f"sgl_kernel.{name} needs a GPU; this is the stand-in for CPU servers")

    kernel.__name__ = name
    return kernel
