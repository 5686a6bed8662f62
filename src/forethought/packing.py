"""A tree's arrays as safetensors bytes, by name, and back into a template; nothing is pickled.

Typed random keys are stored as their data, with their kind in the header. Whatever in a tree is not an array (a
function, a Python number) is the template's.
"""

from __future__ import annotations

import json
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy
from jaxtyping import PyTree

from forethought.tree import named_arrays

Tree = TypeVar("Tree")

# safetensors.numpy writes bfloat16 and cannot read it, hence our own table.
DTYPES = {
    **{"BOOL": "bool", "BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64", "C64": "complex64"},
    **{"I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64"},
    **{"U8": "uint8", "U16": "uint16", "U32": "uint32", "U64": "uint64"},
}


def pack(tree: PyTree) -> bytes:
    """Serialises every JAX and NumPy array of a tree; equal trees give equal bytes.

    Raises ValueError, naming the array, for a dtype that cannot be stored and for two arrays of one name."""
    named = named_arrays(tree)
    if len(named) != len(jax.tree.leaves(eqx.filter(tree, eqx.is_array))):
        raise ValueError("two arrays have one name: some dict key holds a '/'")
    # One entry, since safetensors writes several in random order.
    keys = json.dumps({name: str(leaf.dtype) for name, leaf in named.items() if _is_key(leaf)})
    plain = jax.device_get({name: _data(leaf) for name, leaf in named.items()})
    for name, leaf in plain.items():
        if str(leaf.dtype) not in DTYPES.values():
            raise ValueError(f"'{name}' is {leaf.dtype}, which cannot be stored; use one of {sorted(DTYPES.values())}")
    # In C order, as safetensors assumes; np.ascontiguousarray would turn scalars into vectors.
    return safetensors.numpy.save({name: np.asarray(leaf, order="C") for name, leaf in plain.items()}, {"keys": keys})


def unpack(content: bytes, like: Tree, part: str = "") -> Tree:
    """Returns a tree like the template with the arrays packed: NumPy where it has NumPy, else JAX.

    With `part`, such as 'agent', the template is that of the packed tree's branch of this name.

    Raises ValueError, naming the array, where names, shapes or dtypes differ from the template's."""
    template, rest = eqx.partition(like, eqx.is_array)
    named = named_arrays(template)
    arrays, found = _parse(content)
    if part:
        branch = {name.removeprefix(f"{part}/"): name for name in arrays if name.startswith(f"{part}/")}
        arrays = {short: arrays[name] for short, name in branch.items()}
        found = {short: found[name] for short, name in branch.items()}
    want = {name: _described(leaf.dtype, _data(leaf).shape) for name, leaf in named.items()}
    faults = [f"'{name}' is missing, the template has {want[name]}" for name in want if name not in found]
    faults += [f"'{name}' is {found[name]}, the template has no such array" for name in found if name not in want]
    differ = [name for name in want if found.get(name, want[name]) != want[name]]
    faults += [f"'{name}' is {found[name]}, the template has {want[name]}" for name in differ]
    if faults:
        raise ValueError(faults[0] + (f" (and {len(faults) - 1} more like it)" if len(faults) > 1 else ""))

    def restored(array: np.ndarray, leaf: Any) -> Any:
        if isinstance(leaf, np.ndarray):
            return np.array(array)
        copied = jnp.array(array)  # it may be donated, the bytes it was read from may not
        return jax.random.wrap_key_data(copied, impl=jax.random.key_impl(leaf)) if _is_key(leaf) else copied

    leaves = [restored(arrays[name], leaf) for name, leaf in named.items()]
    return eqx.combine(jax.tree.unflatten(jax.tree.structure(template), leaves), rest)


def _parse(content: bytes) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """The arrays by name, and what each of them is. Raises ValueError for what is not whole."""
    try:
        entries = safetensors.deserialize(content)
    except safetensors.SafetensorError as error:
        raise ValueError(f"is damaged ({error})") from error
    arrays = {
        name: np.frombuffer(entry["data"], np.dtype(DTYPES[entry["dtype"]])).reshape(entry["shape"])
        for name, entry in entries
    }
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    keys = json.loads(header["__metadata__"]["keys"])
    return arrays, {name: _described(keys.get(name, array.dtype), array.shape) for name, array in arrays.items()}


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _data(leaf: Any) -> Any:
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def _described(dtype: Any, shape: tuple[int, ...]) -> str:
    return f"{dtype}{list(shape)}"
