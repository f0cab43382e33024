"""Private names of torch and Megatron that the library uses: one list, held against the installed versions.

The sources are read, not imported: they are there as their authors wrote them, whatever a process has replaced. For
another torch: ``PYTHONPATH=FOLDER`` with an unpacked wheel before this environment.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from used_names import LIBRARY


@dataclass(frozen=True, slots=True)
class Private:
    """A name that may change with any release.

    module: where it is defined. name: of the module's member; with a dot, of that of a class. positional: parameters,
    or fields, that it begins with and that we pass by position (`self` left out). named: others that we pass, or hand
    on, by name.
    """

    module: str
    name: str
    positional: tuple[str, ...] = ()
    named: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


_CORE, _ROPE = "megatron.core", "megatron.core.models.common.embeddings.rope_utils"
_P2P = "megatron.core.pipeline_parallel.p2p_communication"
_TENSORS = ("tensor_send_prev", "tensor_recv_prev", "tensor_send_next", "tensor_recv_next")
PRIVATE = (
    Private("torch._C", "TensorBase._version"),
    Private("torch.distributed.checkpoint.filesystem", "_StorageInfo", ("relative_path", "offset", "length")),
    Private("torch.distributed.distributed_c10d", "_get_default_store"),
    Private(
        "torch.distributed.distributed_c10d",
        "_new_process_group_helper",
        ("group_size", "group_rank", "global_ranks_in_group", "backend", "store"),
        ("group_name", "timeout"),
    ),
    Private("torch.distributed.distributed_c10d", "_world"),
    Private("torch.nn.modules.module", "Module._forward_hooks"),
    Private("torch.nn.modules.module", "Module._forward_pre_hooks"),
    Private("megatron.bridge.models.conversion.auto_bridge", "AutoBridge._model_bridge"),
    Private(
        f"{_CORE}.dist_checkpointing.strategies.torch",
        "_replace_state_dict_keys_with_sharded_keys",
        ("sharded_state_dict",),
        ("keep_only_main_replica",),
    ),
    Private(f"{_CORE}.optimizer.distrib_optimizer", "DistributedOptimizer._copy_main_params_to_model_params"),
    Private(_ROPE, "_apply_rotary_pos_emb_bshd", ("t", "freqs"), ("rotary_interleaved", "mla_rotary_interleaved")),
    Private(_ROPE, "_apply_rotary_pos_emb_thd", ("t", "cu_seqlens", "freqs"), ("cp_group", "multi_latent_attention")),
    Private(
        _P2P, "P2PCommunicator._communicate_shapes", ("tensor_send_next", "tensor_send_prev", "recv_prev", "recv_next")
    ),
    Private(_P2P, "_p2p_ops", named=(*_TENSORS, "group", "prev_pipeline_rank", "next_pipeline_rank")),
    Private(
        f"{_CORE}.tensor_parallel.mappings",
        "_gather_along_first_dim",
        ("input_", "group", "output_split_sizes", "use_global_buffer"),
    ),
    Private(
        f"{_CORE}.tensor_parallel.mappings",
        "_reduce_scatter_along_first_dim",
        ("input_", "group", "input_split_sizes", "use_global_buffer"),
    ),
    Private(f"{_CORE}.tensor_parallel.random", "_get_cuda_rng_state", ("device", "clone", "graph_safe")),
    Private(f"{_CORE}.tensor_parallel.random", "_set_cuda_rng_state", ("new_state", "device", "graph_safe")),
    Private(
        f"{_CORE}.transformer.moe.router",
        "TopKRouter._apply_aux_loss",
        ("probs", "scores_for_aux_loss", "routing_map"),
        ("with_padding_mask",),
    ),
    Private(f"{_CORE}.transformer.multi_latent_attention", "MLASelfAttention._qkv_down_projection", ("hidden_states",)),
)

OF_OTHERS = {
    "_actions": "argparse",
    "_apply_gate": "transformers",
    "_core": "numpy",
    "_devices": "torch: of the compiled ProcessGroupGloo, which every rank makes when it starts",
    "_exit": "os",
    "_private": "ray",
    "_Options": "torch: as _devices",
    "_reconstruct": "numpy",
    "_threads": "torch: as _devices",
    "_timeout": "torch: as _devices",
}
"""Private names that no source of torch or Megatron has, and whose they are."""

_PACKAGES = {"torch": "torch", "megatron.core": "megatron-core", "megatron.bridge": "megatron-bridge"}


def problem_of(private: Private) -> str:
    """Why a name cannot be used as we do, with the version of its package; empty if it can."""
    package = next(name for start, name in _PACKAGES.items() if private.module.startswith(f"{start}."))
    where = f"{package} {importlib.metadata.version(package)}: {private}"
    file = source_of(private.module)
    if file is None:
        return f"{where}: no such module"
    members: list[ast.AST] = [ast.parse(file.read_text(encoding="utf-8"))]
    for part in private.name.split("."):
        members = [member for owner in members for member in members_of(owner, part)]
    if not members:
        return f"{where}: no such name"
    if not (private.positional or private.named):
        return ""
    known = parameters(members[-1])
    if known[: len(private.positional)] != [*private.positional] or not {*private.named} <= {*known}:
        return f"{where}: takes ({', '.join(known)}), and we pass {(*private.positional, *private.named)}"
    return ""


def source_of(module: str) -> Path | None:
    root, *parts = module.split(".")
    spec = importlib.util.find_spec(root)
    for folder in (spec and spec.submodule_search_locations) or ():
        path = Path(folder, *parts)
        for file in (path.with_suffix(".py"), path / "__init__.py", path / "__init__.pyi"):
            if file.is_file():
                return file
    return None


def members_of(owner: ast.AST, name: str) -> Iterator[ast.AST]:
    """Definitions of a name in a module or class, and what a class sets on `self`."""
    for node in ast.walk(owner):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef() if node.name == name:
                yield node
            case ast.Name(ctx=ast.Store()) if node.id == name:
                yield node
            case ast.Attribute(value=ast.Name(id="self"), ctx=ast.Store()) if node.attr == name:
                yield node
            case _:
                pass


def parameters(node: ast.AST) -> list[str]:
    """Returns the parameters of a function, without `self`, or the fields of a class."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            each = node.args
            names = [arg.arg for arg in (*each.posonlyargs, *each.args, *each.kwonlyargs)]
            return names[names[:1] == ["self"] :]
        case ast.ClassDef():
            fields = (line.target for line in node.body if isinstance(line, ast.AnnAssign))
            return [target.id for target in fields if isinstance(target, ast.Name)]
        case _:
            return []


@pytest.mark.parametrize("private", PRIVATE, ids=str)
def test_a_private_name_is_in_the_installed_version_as_it_is_used(private: Private) -> None:
    assert problem_of(private) == ""


@pytest.mark.parametrize(
    ("private", "problem"),
    [
        (Private("torch.distributed.gone", "_x"), "torch.distributed.gone._x: no such module"),
        (Private("torch.distributed.distributed_c10d", "_gone"), "distributed_c10d._gone: no such name"),
        (Private("megatron.core.transformer.moe.router", "TopKRouter._gone"), "TopKRouter._gone: no such name"),
        (Private(_P2P, "_p2p_ops", named=("ring",)), "prev_pipeline_rank, next_pipeline_rank), and we pass ('ring',)"),
        (
            Private("torch.distributed.checkpoint.filesystem", "_StorageInfo", ("relative_path", "length")),
            "_StorageInfo: takes (relative_path, offset, length",
        ),
    ],
    ids=str,
)
def test_what_a_version_lacks_is_named_with_it(private: Private, problem: str) -> None:
    said = problem_of(private)
    assert problem in said
    package = "torch" if private.module.startswith("torch") else "megatron-core"
    assert said.startswith(f"{package} {importlib.metadata.version(package)}: ")


def foreign_names(text: str) -> set[str]:
    """Names with one leading underscore that a file uses as attributes, imports or names in `getattr`, and that neither
    it nor a class of ours that it extends defines."""
    used, own = set[str](), set[str]()
    modules, bases = dict[str, str](), set[str]()
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.ClassDef():
                own.add(node.name)
                bases |= {each.id for base in node.bases for each in ast.walk(base) if isinstance(each, ast.Name)}
            case ast.ImportFrom(module=str(module)) if module.startswith("moerl."):
                modules |= {name.asname or name.name: module for name in node.names}
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                own.add(node.name)
            case ast.Name(ctx=ast.Store()):
                own.add(node.id)
            case ast.Attribute(value=ast.Name(id="self" | "cls"), ctx=ast.Store()):
                own.add(node.attr)
            case ast.Attribute():
                used.add(node.attr)
            case ast.ImportFrom(module=module) if not (module or "").startswith("moerl"):
                used |= {part for name in node.names for part in (*(module or "").split("."), name.name)}
            case ast.Import():
                used |= {part for name in node.names for part in name.name.split(".")}
            case ast.Call(
                func=ast.Name(id="getattr" | "setattr" | "hasattr"), args=[_, ast.Constant(value=str(name)), *_]
            ):
                used.add(name)
            case _:
                pass
    for module in {modules[base] for base in bases & modules.keys()}:
        own |= own_names((LIBRARY.parent / f"{module.replace('.', '/')}.py").read_text())
    return {name for name in used - own if name.startswith("_") and not name.startswith(("__", "_moerl"))}


def own_names(text: str) -> set[str]:
    """Names of methods and attributes that the classes of a file define."""
    nodes = [*ast.walk(ast.parse(text))]
    stored = {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
    return stored | {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_every_private_name_of_others_is_on_the_list_and_all_of_the_list_is_used() -> None:
    listed = {private.name.split(".")[-1] for private in PRIVATE} | OF_OTHERS.keys()
    used = {name: file.name for file in sorted(LIBRARY.rglob("*.py")) for name in foreign_names(file.read_text())}
    assert {name: file for name, file in used.items() if name not in listed} == {}
    assert listed - used.keys() == set()


def test_a_private_name_is_found_however_it_is_used() -> None:
    text = """
from torch import _a
from torch._b import c
import torch._d
import torch
torch.e._f()
class G:
    _h = 1
    def i(self, other):
        self._j = self._h + self._k + other._j
        other._l = getattr(other, "_m")
"""
    assert foreign_names(text) == {"_a", "_b", "_d", "_f", "_k", "_l", "_m"}
