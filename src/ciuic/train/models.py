"""Building the model of a job: a preset with fresh weights, or weights from a folder or the Hugging Face hub."""

import re
from pathlib import Path
from typing import Any

import psutil
import torch
import transformers
from safetensors import SafetensorError
from torch import nn
from transformers.models.deepseek_v3 import DeepseekV3Config, DeepseekV3ForCausalLM

from ciuic.errors import ModelError
from ciuic.job import Job
from ciuic.train.deepseek import PRESETS, check_override_names, parameter_count, preset_config, unknown_preset
from ciuic.train.initial import initial_weights
from ciuic.units import format_bytes

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def build_model(job: Job, vocab_size: int, seed: int) -> nn.Module:
    """The job's causal language model on the CPU, in `job.model.dtype`, in training mode.

    A preset's weights follow `seed` and are the same on every machine. Calling the model with input_ids and labels
    [batch, seq] gives an output with `.loss`, the mean over the predicted tokens.
    Raises ModelError when the model does not exist, does not load, or does not fit the data or this machine.
    """
    if job.model.from_pretrained is not None:
        model = _load_pretrained(job, vocab_size)
    elif job.model.preset is not None:
        model = _build_preset(job, vocab_size, seed)
    else:
        raise ModelError(
            "this job has no model for the built-in trainer",
            cause="model.entry and model.command bring their own training program",
            next="set model.preset or model.from_pretrained, or call build_model only where one of them is set",
        )
    _check_positions(model, job.data.sequence_length)
    model.config.use_cache = False  # keys and values of past tokens are for generating text
    return model.train()


def _build_preset(job: Job, vocab_size: int, seed: int) -> transformers.PreTrainedModel:
    name = str(job.model.preset)
    config = preset_config(name, vocab_size, job.model.overrides)
    _check_memory(name, config)
    with initial_weights(seed):
        model = DeepseekV3ForCausalLM(config)
    return _to_dtype(model, DTYPES[job.model.dtype])


def _check_memory(name: str, config: DeepseekV3Config) -> None:
    """Weights alone must fit, else the machine would swap or the process be killed without a word."""
    parameters = parameter_count(config)
    needed_bytes, free_bytes = 4 * parameters, psutil.virtual_memory().available
    if needed_bytes > free_bytes:
        raise ModelError(
            f"{name} does not fit on this machine",
            cause=f"its {parameters:,} parameters need {format_bytes(needed_bytes)} while they are built, "
            f"{format_bytes(free_bytes)} are free",
            next=f"choose a smaller preset ({', '.join(PRESETS)}) or a larger machine",
        )


def _to_dtype(model: transformers.PreTrainedModel, dtype: torch.dtype) -> transformers.PreTrainedModel:
    """Convert the parameters but those the architecture keeps in single precision (routers and their biases)."""
    kept = model._keep_in_fp32_modules_strict or set()
    for name, parameter in model.named_parameters():
        if not any(part in name for part in kept):
            parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype
    return model


def _load_pretrained(job: Job, vocab_size: int) -> transformers.PreTrainedModel:
    name = str(job.model.from_pretrained)
    source = _resolve_source(name)
    config = _pretrained_config(name, source, job)
    if vocab_size > config.get_text_config().vocab_size:
        raise ModelError(
            f"{name} does not know all tokens of the data",
            cause=f"the tokenizer {job.data.tokenizer!r} has {vocab_size} tokens, "
            f"the model {config.get_text_config().vocab_size}",
            next=f"set data.tokenizer to the model's own, for example {name!r}",
        )
    try:
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
            source,
            config=config,
            dtype=DTYPES[job.model.dtype],
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        raise _load_error(name, error) from error
    model, loading = loaded
    missing = sorted(loading["missing_keys"]) + sorted(str(key) for key in loading["mismatched_keys"])
    if missing:
        raise ModelError(
            f"the weights of {name} are incomplete",
            cause=f"{len(missing)} tensors are missing or have another shape, the first is {missing[0]}",
            next="check model.overrides and that the folder holds every safetensors file of its index",
        )
    return model


def _resolve_source(name: str) -> str:
    """A folder that exists, or a hub id; anything else is an error that says which of the two was meant."""
    if name in PRESETS:
        raise ModelError(
            f"{name} is a preset, it has no trained weights",
            next=f'write preset = "{name}" instead of from_pretrained',
        )
    if re.fullmatch(r"(?i)v\d+(\.\d+)?|deepseek[^/]*", name) and not Path(name).is_dir():
        raise unknown_preset(name)
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelError(f"the folder {name} holds no model", cause="it has no config.json")
        if not any(folder.glob("*.safetensors")):
            raise ModelError(
                f"the folder {name} holds no weights that may be loaded",
                cause="there is no *.safetensors file; other formats can run code when they are read",
                next="save the model again with save_pretrained(..., safe_serialization=True)",
            )
        return str(folder)
    if name.startswith(("/", "./", "../", "~")) or name.count("/") > 1:
        raise ModelError(f"there is no folder {name}", next="correct model.from_pretrained on this node")
    return name


def _pretrained_config(name: str, source: str, job: Job) -> transformers.PreTrainedConfig:
    try:
        config = transformers.AutoConfig.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise _load_error(name, error) from error
    if getattr(config, "quantization_config", None) is not None:
        raise ModelError(
            f"the weights of {name} are quantised, they cannot be trained",
            next="use a version of the model in bfloat16 or float32",
        )
    check_override_names(job.model.overrides, list(config.to_dict()))
    for field, value in job.model.overrides.items():
        setattr(config, field, value)
    return config


def _load_error(name: str, error: Exception) -> ModelError:
    return ModelError(
        f"the model {name} cannot be loaded",
        cause=" ".join(str(error).split())[:400],
        next="check the name and that this node reaches the hub, or copy the model to a folder on every node",
    )


def _check_positions(model: transformers.PreTrainedModel, sequence_length: int) -> None:
    limit = getattr(model.config, "max_position_embeddings", None)
    if isinstance(limit, int) and sequence_length + 1 > limit:
        raise ModelError(
            f"data.sequence_length {sequence_length} is too long for this model",
            cause=f"the model has {limit} positions and one more token than the sequence is read",
            next=f"set data.sequence_length to at most {limit - 1}",
        )
