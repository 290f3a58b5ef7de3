"""A checkpoint directory in the original names: ``config.json``, safetensors shards, an index if there are several.

`Checkpoint` reads one weight at a time, straight from the files; `load` brings all of them into memory; `save` writes
the same layout. bf16, fp16 and fp32 are read; quantised files are refused by name. Nothing is executed and nothing
unpickled.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from probe.dims import Dims, read_config
from probe.errors import BadCheckpoint
from probe.leaves import FP32
from probe.weights import InMemory, weight_sites

_PLAIN = (torch.bfloat16, torch.float16, torch.float32)
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Source:
    """Where a weight is kept: the module, and which rows of its stored ``.weight`` ([out in]) are this weight's.

    Args:
        module: the module's path inside its block (or inside the model).
        rows: which stored rows, given the sizes; None: all. A pair of weights that share a module partition its rows.
        tensor: the tensor of the module.
    """

    module: str
    rows: Callable[[Dims], Tensor] | None = None
    tensor: str = "weight"


def _by_head(first: Callable[[Dims], int], second: Callable[[Dims], int], take: int) -> Callable[[Dims], Tensor]:
    """Rows of a module that alternates two weights by head: ``first`` rows, then ``second``; take part 0 or 1."""

    def rows(dims: Dims) -> Tensor:
        a, b = first(dims), second(dims)
        table = torch.arange(dims.h * (a + b)).view(dims.h, a + b)
        return (table[:, a:] if take else table[:, :a]).reshape(-1)

    return rows


_Q_ROWS = [_by_head(lambda dims: dims.n, lambda dims: dims.r, part) for part in (0, 1)]
_KV_ROWS = [_by_head(lambda dims: dims.n, lambda dims: dims.v, part) for part in (0, 1)]

SOURCES: dict[str, Source] = {
    "W_E": Source("embed_tokens"),
    "w_attn": Source("input_layernorm"),
    "W_DQ": Source("self_attn.q_a_proj"),
    "w_Q": Source("self_attn.q_a_layernorm"),
    "W_UQ": Source("self_attn.q_b_proj", _Q_ROWS[0]),
    "W_QR": Source("self_attn.q_b_proj", _Q_ROWS[1]),
    "W_DKV": Source("self_attn.kv_a_proj_with_mqa", lambda dims: torch.arange(dims.r_kv)),
    "W_KR": Source("self_attn.kv_a_proj_with_mqa", lambda dims: dims.r_kv + torch.arange(dims.r)),
    "w_KV": Source("self_attn.kv_a_layernorm"),
    "W_UK": Source("self_attn.kv_b_proj", _KV_ROWS[0]),
    "W_UV": Source("self_attn.kv_b_proj", _KV_ROWS[1]),
    "W_O": Source("self_attn.o_proj"),
    "w_ffn": Source("post_attention_layernorm"),
    "W_1": Source("mlp.gate_proj"),
    "W_3": Source("mlp.up_proj"),
    "W_2": Source("mlp.down_proj"),
    "W_g": Source("mlp.gate"),
    "b": Source("mlp.gate", tensor="e_score_correction_bias"),
    "W_1_e": Source("mlp.experts.{e}.gate_proj"),
    "W_3_e": Source("mlp.experts.{e}.up_proj"),
    "W_2_e": Source("mlp.experts.{e}.down_proj"),
    "W_1_s": Source("mlp.shared_experts.gate_proj"),
    "W_3_s": Source("mlp.shared_experts.up_proj"),
    "W_2_s": Source("mlp.shared_experts.down_proj"),
    "w_final": Source("norm"),
    "W_U": Source("lm_head"),
}
"""Where each weight of the card comes from. W_UQ and W_QR alternate by head in one module, so do W_UK and W_UV."""


def stored_name(block: int | None, name: str, dims: Dims, expert: int | None = None) -> str:
    """A weight's full name in a checkpoint, e.g. ``model.layers.3.self_attn.o_proj.weight``."""
    source = SOURCES[name]
    module = source.module
    if dims.r_q is None:
        module = module.replace("q_b_proj", "q_proj") if module == "self_attn.q_b_proj" else module
    module = module.format(e=expert)
    if name == "W_U":
        return "lm_head.weight"
    return f"model.{'' if block is None else f'layers.{block}.'}{module}.{source.tensor}"


def shown(stored: Tensor, name: str, dims: Dims) -> Tensor:
    """A stored tensor as the card shows it: this weight's rows, [in out]. W_E is kept [V d], a row a token."""
    rows = SOURCES[name].rows
    if rows is not None:
        stored = _take(stored, rows(dims))
    return stored if stored.ndim == 1 or name == "W_E" else stored.T


def _take(stored: Tensor, rows: Tensor) -> Tensor:
    """Those rows: a view where they lie together, else a copy."""
    start, count = int(rows[0]), len(rows)
    together = int(rows[-1]) - start + 1 == count
    return stored[start : start + count] if together else stored[rows]


class Checkpoint:
    """A directory of safetensors, read a weight at a time.

    Args:
        directory: holds ``config.json`` and either ``model.safetensors`` or an index with its shards.
        dtype: what weights are cast to as they are read; None: as stored. Router weight and correction bias are fp32
            always.

    Raises:
        BadConfig: the config is missing or cannot be honoured.
        BadCheckpoint: a file is missing or damaged; a tensor is missing, doubly listed, of a wrong shape or an unknown
            dtype; a quantised checkpoint; a head that contradicts the config. All of it from headers, before a weight
            is read.
    """

    resident = False

    def __init__(self, directory: str | Path, dtype: torch.dtype | None = None) -> None:
        self.directory = Path(directory)
        if not self.directory.is_dir():
            raise BadCheckpoint(f"{self.directory}: there is no such directory.")
        self.config = read_config(self.directory)
        self.dims = Dims.from_config(self.config)
        if quantised := self.config.get("quantization_config"):
            method = quantised.get("quant_method", "?") if isinstance(quantised, dict) else quantised
            raise BadCheckpoint(
                f"{self.directory}: its weights are quantised ({method}); only bf16, fp16 and fp32 are read yet."
            )
        self.dtype = dtype
        self._files = ExitStack()
        self._handles: dict[str, Any] = {}
        self.shards = self._find_shards()
        self.ignored: tuple[str, ...] = ()
        self._check()

    def __reduce__(self) -> tuple[type[Checkpoint], tuple[Path, torch.dtype | None]]:
        """A copy, pickled or not, opens the files anew: open ones cannot be copied."""
        return type(self), (self.directory, self.dtype)

    def _find_shards(self) -> dict[str, str]:
        """Tensor → file, from the index, or from the one file's own header."""
        index = self.directory / _INDEX
        if not index.exists():
            single = "model.safetensors"
            if not (self.directory / single).exists():
                raise BadCheckpoint(f"{self.directory}: it holds neither {_INDEX} nor {single}.")
            return dict.fromkeys(self._open(single).keys(), single)
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            listed = {str(name): str(file) for name, file in weight_map.items()}
        except (ValueError, KeyError, TypeError, AttributeError):
            raise BadCheckpoint(f"{index}: not an index: a JSON object with a weight_map is needed.") from None
        files = sorted(set(listed.values()))
        for file in files:
            if Path(file).name != file or file == "..":
                raise BadCheckpoint(f"{index}: it names {file!r}, which is not a file of this directory.")
        for file in files:
            held = set(self._open(file).keys())
            said = {name for name, where in listed.items() if where == file}
            if absent := sorted(said - held):
                raise BadCheckpoint(f"{self.directory / file}: the index says that it holds {absent[0]}; it does not.")
            if extra := sorted(held - said):
                raise BadCheckpoint(
                    f"{self.directory / file}: it holds {extra[0]}, which the index does not list there."
                )
        return listed

    def _open(self, file: str) -> Any:
        if file not in self._handles:
            try:
                self._handles[file] = self._files.enter_context(safe_open(self.directory / file, framework="pt"))
            except FileNotFoundError:
                raise BadCheckpoint(f"{self.directory / file}: the shard is missing.") from None
            except (SafetensorError, OSError) as error:
                raise BadCheckpoint(f"{self.directory / file}: not a readable safetensors file ({error}).") from None
        return self._handles[file]

    def _check(self) -> None:
        """Every tensor that the config implies is there, in its shape and a plain dtype; else only known ballast is."""
        expected = stored_shapes(self.dims)
        for name, shape in expected.items():
            if name not in self.shards:
                raise BadCheckpoint(f"{self.directory}: {name} is missing.")
            header = self._open(self.shards[name]).get_slice(name)
            if tuple(header.get_shape()) != shape:
                raise BadCheckpoint(f"{self.directory}: {name} should be {list(shape)}, and is {header.get_shape()}.")
            if header.get_dtype() not in ("BF16", "F16", "F32"):
                raise BadCheckpoint(
                    f"{self.directory}: {name} is {header.get_dtype()}; only BF16, F16 and F32 are read yet."
                )
        extra = [name for name in self.shards if name not in expected]
        self.ignored = tuple(name for name in extra if _is_ballast(name, self.dims, self.config))
        if unknown := sorted(set(extra) - set(self.ignored)):
            if self.dims.tied and unknown == ["lm_head.weight"]:
                raise BadCheckpoint(f"{self.directory}: it holds lm_head.weight, but tie_word_embeddings is true.")
            raise BadCheckpoint(
                f"{self.directory}: {unknown[0]} is no tensor of this model ({len(unknown)} such in all)."
            )

    def read(self, block: int | None, name: str, experts: Sequence[int] | None = None) -> Tensor:
        """One weight of one block as the card shows it, [in out]; of a routed one only these experts' rows."""
        if name == "W_U" and self.dims.tied:
            return self.read(None, "W_E").T
        if name.endswith("_e"):
            chosen = range(self.dims.e) if experts is None else experts
            return torch.stack([self._read(stored_name(block, name, self.dims, e)) for e in chosen]).transpose(1, 2)
        tensor = shown(self._read(stored_name(block, name, self.dims)), name, self.dims)
        return tensor.to(torch.float32) if name in FP32 else tensor

    def _read(self, stored: str) -> Tensor:
        tensor: Tensor = self._open(self.shards[stored]).get_tensor(stored)
        return tensor if self.dtype is None or stored.endswith((".gate.weight", "bias")) else tensor.to(self.dtype)

    def in_memory(self) -> InMemory:
        """All weights, read once."""
        return InMemory(self.dims, {(b, leaf.name): self.read(b, leaf.name) for b, leaf in weight_sites(self.dims)})


def stored_shapes(dims: Dims) -> dict[str, tuple[int, ...]]:
    """Every tensor that a checkpoint of these sizes holds, by its original name, with its stored shape ([out in])."""
    shapes: dict[str, tuple[int, ...]] = {}
    for block, leaf in weight_sites(dims):
        sizes = [dims.d if axis == "r_q" and dims.r_q is None else dims.size(axis) for axis in leaf.shape]
        if leaf.routed:
            shapes.update({stored_name(block, leaf.name, dims, e): (sizes[2], sizes[1]) for e in range(dims.e)})
        elif len(sizes) == 1 or leaf.name == "W_E":
            shapes[stored_name(block, leaf.name, dims)] = tuple(sizes)
        else:
            name = stored_name(block, leaf.name, dims)
            before = shapes.get(name, (0,))[0]
            shapes[name] = (before + sizes[1], sizes[0])
    return shapes


def _is_ballast(name: str, dims: Dims, config: Mapping[str, Any]) -> bool:
    """Tensors that some checkpoints carry and no model uses: K2's stale rotary buffer, and extra next-token layers."""
    extra = config.get("num_nextn_predict_layers") or 0
    if name.endswith("rotary_emb.inv_freq"):
        return True
    return any(name.startswith(f"model.layers.{dims.blocks + i}.") for i in range(int(extra)))


def load(directory: str | Path, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> InMemory:
    """Read a checkpoint directory into memory.

    Args:
        directory: see `Checkpoint`.
        dtype: what to cast weights to; None: as stored. Router weight and correction bias are fp32 always.
        device: where to keep them.

    Raises:
        BadConfig, BadCheckpoint: as `Checkpoint`.
    """
    weights = Checkpoint(directory, dtype).in_memory()
    return weights if device is None else weights.to(dtype, device)


def save(
    weights: InMemory,
    directory: str | Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    shards: int = 1,
    **config: Any,
) -> None:
    """Write weights as a checkpoint in the original names: ``model-1-of-2.safetensors`` …, an index, ``config.json``.

    Args:
        dtype: of all tensors but the correction bias, which stays fp32.
        shards: how many files; tensors are spread so that each holds consecutive ones.
        config: further keys for ``config.json`` (token ids, say).
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    state = dict(_stored(weights, dtype))
    names = list(state)
    ends = [-(-i * len(names) // shards) for i in range(shards + 1)]  # no shard is empty
    weight_map: dict[str, str] = {}
    for i in range(shards):
        file = f"model-{i + 1}-of-{shards}.safetensors" if shards > 1 else "model.safetensors"
        part = names[ends[i] : ends[i + 1]]
        save_file({name: state[name] for name in part}, directory / file, metadata={"format": "pt"})
        (directory / file).chmod(0o644)  # it comes from a temporary file, readable by its owner alone
        weight_map.update(dict.fromkeys(part, file))
    # What an earlier save left under the other layout's name would be read instead, by us or by transformers.
    (directory / ("model.safetensors" if shards > 1 else _INDEX)).unlink(missing_ok=True)
    if shards > 1:
        total = sum(tensor.nbytes for tensor in state.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (directory / _INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    full = {**weights.dims.to_config(), "torch_dtype": str(dtype).removeprefix("torch."), **config}
    (directory / "config.json").write_text(json.dumps(full, indent=1) + "\n", encoding="utf-8")


def _stored(weights: InMemory, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Original name → stored tensor, pairs that share a module put together again."""
    dims = weights.dims
    shapes = stored_shapes(dims)
    shared: dict[str, Tensor] = {}
    for block, leaf in weight_sites(dims):
        tensor = weights.read(block, leaf.name).detach()
        kept = torch.float32 if leaf.name == "b" else dtype
        if leaf.routed:
            for e in range(dims.e):
                yield stored_name(block, leaf.name, dims, e), tensor[e].T.to(kept).contiguous()
            continue
        name = stored_name(block, leaf.name, dims)
        stored = tensor if tensor.ndim == 1 or leaf.name == "W_E" else tensor.T
        rows = SOURCES[leaf.name].rows
        if rows is None:
            yield name, stored.to(kept).contiguous().clone()
            continue
        whole = shared.setdefault(name, torch.empty(shapes[name], dtype=kept, device=stored.device))
        whole[rows(dims)] = stored.to(kept)
    yield from shared.items()
