"""`python -m ciuic.train.shapes`: reads a job (JSON) on stdin, prints what its model would exchange (JSON on stdout).

For programs that do not load torch. The model is built without memory, so any size works on any machine.
"""

import json
import sys

import msgspec
import transformers
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.models.deepseek_v3 import DeepseekV3ForCausalLM

from ciuic.errors import CiuicError, ModelError, error_to_dict
from ciuic.job import Job, parse_job
from ciuic.plan.settings import shape_of
from ciuic.train.deepseek import preset_config
from ciuic.train.tensors import model_layout
from ciuic.train.tokenizer import load_tokenizer


def model_shape(job: Job) -> dict[str, object]:
    """`parameters`, and `shape`: a FragmentShape of all fragments together.

    Raises ModelError or DataError when the job's model or tokenizer cannot be found.
    """
    with FakeTensorMode():
        layout, _ = model_layout(_build(job))
    return {"parameters": layout.parameter_count, "shape": msgspec.to_builtins(shape_of(layout))}


def _build(job: Job) -> nn.Module:
    if job.model.preset is not None:
        vocabulary = load_tokenizer(job.data.tokenizer).vocab_size
        return DeepseekV3ForCausalLM(preset_config(job.model.preset, vocabulary, job.model.overrides))
    if job.model.from_pretrained is None:
        raise ModelError(
            "the size of your own model is not known before it runs",
            cause="model.entry and model.command bring their own training program",
            next="set model.preset or model.from_pretrained",
        )
    try:
        config = transformers.AutoConfig.from_pretrained(job.model.from_pretrained, trust_remote_code=False)
        for field, value in job.model.overrides.items():
            setattr(config, field, value)
        return transformers.AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(
            f"the model {job.model.from_pretrained} cannot be read",
            cause=" ".join(str(error).split())[:400],
            next="check model.from_pretrained, or say the size: `ciuic plan JOB.toml --parameters 5M`",
        ) from error


def main() -> int:
    """Errors are printed as {"error": ...}, too."""
    try:
        sys.stdout.write(json.dumps(model_shape(parse_job(json.load(sys.stdin)))) + "\n")
    except CiuicError as error:
        sys.stdout.write(json.dumps({"error": error_to_dict(error)}) + "\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
