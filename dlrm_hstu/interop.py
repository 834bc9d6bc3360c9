"""Exchange of weights, gradients and inputs with the public reference trainer, under its names."""

from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import Tensor, nn

from dlrm_hstu.batch import Batch
from dlrm_hstu.config import CONTEXTUAL_FEATURES
from dlrm_hstu.model import DlrmHSTU

_TRANSDUCER = "_hstu_transducer."
_PREPROCESSOR = _TRANSDUCER + "_input_preprocessor."
_NAMES = {
    "preprocessor.contextual_weight": _PREPROCESSOR + "_batched_contextual_linear_weights",
    "preprocessor.contextual_bias": _PREPROCESSOR + "_batched_contextual_linear_bias",
    "preprocessor.action_table": _PREPROCESSOR + "_action_encoder._action_embedding_table",
    "preprocessor.target_action": _PREPROCESSOR + "_action_encoder._target_action_embedding_table",
    "transducer.position_table": _TRANSDUCER + "_positional_encoder._position_embeddings_weight",
    "transducer.time_table": _TRANSDUCER + "_positional_encoder._timestamp_embeddings_weight",
    "uvqk_weight": "_uvqk_weight",
    "uvqk_bias": "_uvqk_beta",
    "output_weight": "_output_weight",
    "input_norm.weight": "_input_norm_weight",
    "input_norm.bias": "_input_norm_bias",
    "output_norm.weight": "_output_norm_weight",
    "output_norm.bias": "_output_norm_bias",
}
_MODULES = {
    "preprocessor.content.": _PREPROCESSOR + "_content_embedding_mlp.",
    "preprocessor.additional.": _PREPROCESSOR + "_additional_embedding_mlp.",
    "preprocessor.action.": _PREPROCESSOR + "_action_embedding_mlp.",
    "postprocessor.time_combiner.": _TRANSDUCER + "_output_postprocessor._time_feature_combiner.",
    "postprocessor.norm.": _TRANSDUCER + "_output_postprocessor._layer_norm.",
    "item_tower.": "_item_embedding_mlp.",
    "head.": "_multitask_module._prediction_module.",
    "embeddings.collection.": "_embedding_collection.",
}
_MLP_PARTS = {"inner": "0", "gate": "1", "outer": "2", "norm": "3"}
_LAYER, _REFERENCE_LAYER = "transducer.layers.", _TRANSDUCER + "_stu_module._stu_layers."


def reference_name(name: str) -> str:
    """The reference's name of one of our parameters. Raises KeyError where there is none."""
    if name in _NAMES:
        return _NAMES[name]
    if name.startswith(_LAYER):
        index, part = name.removeprefix(_LAYER).split(".", 1)
        return f"{_REFERENCE_LAYER}{index}.{_NAMES[part]}"
    for ours, theirs in _MODULES.items():
        if name.startswith(ours):
            part, _, field = name.removeprefix(ours).partition(".")
            return theirs + (f"{_MLP_PARTS[part]}.{field}" if part in _MLP_PARTS else name.removeprefix(ours))
    raise KeyError(name)


def _parameters(model: DlrmHSTU) -> Iterator[tuple[str, nn.Parameter]]:
    for name, parameter in model.named_parameters():
        yield reference_name(name), parameter


@torch.no_grad()
def load_reference_state(model: DlrmHSTU, state: Mapping[str, np.ndarray]) -> None:
    """Copy arrays by reference name into an unsharded model. Raises ValueError on missing, surplus or misshapen ones."""
    parameters = dict(_parameters(model))
    missing, surplus = sorted(parameters.keys() - state.keys()), sorted(state.keys() - parameters.keys())
    if missing or surplus:
        raise ValueError(f"reference state: missing {missing or 'nothing'}, surplus {surplus or 'nothing'}; names must match exactly")
    for name, parameter in parameters.items():
        array = torch.as_tensor(np.asarray(state[name]))
        if array.shape != parameter.shape:
            raise ValueError(f"reference state: {name} has shape {tuple(array.shape)}, the model needs {tuple(parameter.shape)}")
        parameter.copy_(array)


def reference_state(model: DlrmHSTU) -> dict[str, np.ndarray]:
    """A copy of an unsharded model's parameters by reference name."""
    return {name: parameter.detach().cpu().numpy().copy() for name, parameter in _parameters(model)}


def reference_gradients(model: DlrmHSTU) -> dict[str, np.ndarray]:
    """A copy of an unsharded model's gradients by reference name; parameters without one are left out."""
    return {name: parameter.grad.cpu().numpy().copy() for name, parameter in _parameters(model) if parameter.grad is not None}


def batch_from_reference(
    uih: Mapping[str, np.ndarray],
    uih_lengths: Mapping[str, np.ndarray],
    candidate: Mapping[str, np.ndarray],
    contextual_features: tuple[str, ...] = CONTEXTUAL_FEATURES,
) -> Batch:
    """A Batch from jagged, sample-major arrays by reference feature name.

    uih: item_id, artist_id, album_id, action_weight, action_timestamp [T] and one id a sample for each contextual feature.
    uih_lengths: [B] by feature; item_id's counts. candidate: item_candidate_id, item_candidate_artist_id, item_candidate_album_id,
    item_query_time, item_action_weight [S], the same number for every sample. Raises ValueError where counts do not fit.
    """
    lengths = np.asarray(uih_lengths["item_id"])
    history = np.stack([np.asarray(uih[name]) for name in ("item_id", "artist_id", "album_id")])
    targets = np.stack([np.asarray(candidate[f"item_candidate_{name}"]) for name in ("id", "artist_id", "album_id")])
    batch_size, tokens, candidates = len(lengths), history.shape[1], targets.shape[1]
    if lengths.sum() != tokens:
        raise ValueError(f"item_id has {tokens} values, its lengths sum to {lengths.sum()}: they must agree")
    if batch_size == 0 or candidates % batch_size:
        raise ValueError(f"{candidates} candidates for {batch_size} samples: every sample needs the same number")
    for name in contextual_features:
        if len(uih[name]) != batch_size:
            raise ValueError(f"{name} has {len(uih[name])} values for {batch_size} samples: a contextual feature has one a sample")
    triples, item = np.unique(np.concatenate([history, targets], axis=1), axis=1, return_inverse=True)
    item = item.reshape(-1)
    events = np.stack([item[:tokens], np.asarray(uih["action_weight"]), np.asarray(uih["action_timestamp"])])
    events, token_event = np.unique(events, axis=1, return_inverse=True)
    each = candidates // batch_size
    contextual = np.stack([np.asarray(uih[name]) for name in contextual_features]) if contextual_features else np.zeros((0, batch_size))
    return Batch(
        item_ids=_int32(triples[0]),
        artist_ids=_int32(triples[1]),
        album_ids=_int32(triples[2]),
        event_item=_int32(events[0]),
        event_action=torch.as_tensor(events[1].astype(np.uint8)),
        event_time=_int32(events[2]),
        token_event=_int32(token_event.reshape(-1)),
        history_lengths=_int32(lengths),
        candidate_item=_int32(item[tokens:]),
        candidate_time=_int32(candidate["item_query_time"]),
        candidate_action=torch.as_tensor(np.asarray(candidate["item_action_weight"]).astype(np.uint8)),
        num_candidates=torch.full((batch_size,), each, dtype=torch.int32),
        contextual_ids=_int32(contextual),
        sample_index=torch.arange(batch_size, dtype=torch.int32),
        weight=torch.ones(batch_size),
        max_history_length=int(lengths.max()),
        max_num_candidates=each,
        real_samples=batch_size,
        global_real_samples=batch_size,
    )


def _int32(values: np.ndarray) -> Tensor:
    values = np.asarray(values)
    if values.size and (values.min() < -(2**31) or values.max() >= 2**31):
        raise ValueError(f"value {values.max()} (or {values.min()}) does not fit 32 bits; ids and seconds must")
    return torch.as_tensor(values.astype(np.int32))
