"""Class I: checkpoint and resume."""

from ciuic.doctor.catalogue.code import Code
from ciuic.doctor.finding import Severity

CODES: tuple[Code, ...] = (
    Code(
        code="CIUIC-I1",
        title="the optimizer's state was lost at a resume",
        severity=Severity.WARNING,
        meaning=(
            "Weights went on, moments began at zero: the next steps are as large as the first ones of a run, and the "
            "loss jumps."
        ),
        detection=(
            "The optimizer's state was empty before its first step and has moments after it, although a state was "
            "there to be loaded: in a file that torch.load has read and whose weights the model took, or in another "
            "optimizer. It is sure when something else of training was restored (scheduler, scaler, another "
            "optimizer), and else a note: fine-tuning takes the weights of a checkpoint and no more. A state that is "
            "empty in the file although the file counts steps was lost when it was saved."
        ),
        fix=("optimizer.load_state_dict(checkpoint['optimizer']), after the optimizer was built for the last time"),
        fixes=(
            "A saver that builds a new optimizer or wrapper before it saves writes an empty state: look at "
            "`len(optimizer.state_dict()['state'])` when saving."
        ),
        example=(
            "```python\nmodel.load_state_dict(saved['model'])\nscheduler.load_state_dict(saved['scheduler'])\n```\n\n"
            "torch says nothing. The doctor: `checkpoint.pt has the optimizer's state, and it was never loaded: its "
            "moments start again (all ranks)`."
        ),
        explains=(
            "CIUIC-I3",
            "CIUIC-D2",
            "CIUIC-G4",
            "CIUIC-G8",
        ),
        depth=0,
    ),
    Code(
        code="CIUIC-I2",
        title="a load loaded nothing",
        severity=Severity.CRITICAL,
        meaning=(
            "With `strict=False` names that do not fit are left out in silence. Here none, or hardly any, fits: the "
            "model trains from its random weights."
        ),
        detection=(
            "The names that load_state_dict used, against those it was given; and whether the ones that are left "
            "over differ from the missing ones by a prefix only (`module.`, `model.`, `_orig_mod.`). The best load "
            "of each module before the first step counts: trying first and repairing then is not meant. A state of "
            "which all was used is not meant either, be it a few tensors of an adapter."
        ),
        fix="strip the prefix from the names of the state, and load with strict=True",
        fixes=(
            "```python\nstate = {name.removeprefix('module.'): tensor for name, tensor in state.items()}\n"
            "model.load_state_dict(state)\n```"
        ),
        example=(
            "```python\nmodel.load_state_dict(torch.load('ddp.pt'), strict=False)\n```\n\ntorch says nothing. The "
            "doctor: `load_state_dict put none of 16 tensors into Net: names of the state begin with module.`."
        ),
        explains=("CIUIC-I5",),
        depth=0,
    ),
    Code(
        code="CIUIC-I3",
        title="scheduler or loss scale was not restored",
        severity=Severity.WARNING,
        meaning=(
            "The learning rate warms up or decays once more, or the loss scale starts too high or too low and steps "
            "are skipped."
        ),
        detection=(
            "A file that torch.load has read has the state of a scheduler or scaler, another part of training was "
            "restored, the program has such a scheduler or scaler, nothing was loaded into it, and it is not where "
            "the file says (the scheduler's count, the scale). A new scheduler for fine-tuning, without the "
            "optimizer's state, is not meant."
        ),
        fix="scheduler.load_state_dict(checkpoint['scheduler']); scaler.load_state_dict(checkpoint['scaler'])",
        fixes="Load the scheduler after the optimizer: its constructor sets the rate anew.",
        example=(
            "torch says nothing. The doctor: `checkpoint.pt has the scheduler's state (14), and it was never loaded: "
            "training went on with 1 (all ranks)`."
        ),
        explains=(
            "CIUIC-D2",
            "CIUIC-G3",
            "CIUIC-G4",
            "CIUIC-G5",
            "CIUIC-G6",
            "CIUIC-G7",
            "CIUIC-G8",
        ),
        depth=0,
    ),
    Code(
        code="CIUIC-I4",
        title="a tie between parameters is broken",
        severity=Severity.WARNING,
        meaning=(
            "Embedding and output layer, or other layers, were one parameter and are two now. They are trained "
            "apart, memory grows, and a later load may keep only one of them."
        ),
        detection=(
            "Names that stood for one parameter before load_state_dict stand for two after it, and still do when "
            "training begins; a configuration says tie_word_embeddings and the two differ; or an embedding and a "
            "linear layer begin with the same values as two parameters. Layers that are tied again after the load "
            "are not meant, nor frozen ones."
        ),
        fix=("tie again after the load: model.head.weight = model.tokens.weight (transformers: model.tie_weights())"),
        fixes=(
            "`load_state_dict(..., assign=True)`, `copy.deepcopy` of a part, and sharding part by part break ties. "
            "Build the optimizer and the wrapper after tying."
        ),
        example=(
            "```python\nmodel.load_state_dict(state, assign=True)\n```\n\ntorch says nothing. The doctor: "
            "`tokens.weight and head.weight were one parameter before load_state_dict and are two after it`."
        ),
        depth=0,
    ),
    Code(
        code="CIUIC-I5",
        title="only a part was loaded",
        severity=Severity.WARNING,
        meaning=(
            "Some tensors of the state found no place in the model. A new head on an old body is meant so; a part "
            "whose names differ by a prefix is not."
        ),
        detection=(
            "As CIUIC-I2, when most of the state was used. A note, unless the names left over fit the missing ones "
            "after a prefix is stripped."
        ),
        fix="compare missing_keys and unexpected_keys of what load_state_dict returns",
        fixes=(
            "```python\nresult = model.load_state_dict(state, strict=False)\nassert not result.unexpected_keys\n```"
        ),
        example="The doctor: `load_state_dict put 148 of 150 tensors into Vit; left out: head.weight, head.bias`.",
        depth=1,
    ),
    Code(
        code="CIUIC-I6",
        title="the ranks loaded different things",
        severity=Severity.CRITICAL,
        meaning=(
            "A state was loaded on some ranks only, or from files with other contents, and nothing made the ranks "
            "equal afterwards. Equal gradients keep them apart."
        ),
        detection=(
            "Parameters differ at the first step (CIUIC-D1), and so do the digests of what was loaded before. A load "
            "on rank 0 that a wrapper broadcasts is not meant: parameters are equal then."
        ),
        fix="load on all ranks, or on rank 0 before DistributedDataParallel is built",
        fixes=(
            "```python\nstate = torch.load(path, map_location='cpu')   # every rank\nmodel.load_state_dict(state)\n"
            "ddp = DistributedDataParallel(model)\n```"
        ),
        example=(
            "torch says nothing. The doctor: `a state was loaded into Net on rank 0 only, and the ranks began with "
            "different parameters`."
        ),
        explains=(
            "CIUIC-D1",
            "CIUIC-D2",
            "CIUIC-D3",
            "CIUIC-D4",
            "CIUIC-A6",
        ),
        depth=0,
    ),
    Code(
        code="CIUIC-I7",
        title="several ranks write one file at the same time",
        severity=Severity.WARNING,
        meaning="The file may hold parts of both writes, or the older one. It is found out when it is needed.",
        detection="torch.save with the same absolute path, on ranks of one machine, at the same step or one apart.",
        fix="if rank == 0: torch.save(...); dist.barrier()",
        fixes=(
            "Write under another name and rename: `os.replace(new, path)`. States that differ by rank need the rank "
            "in the name."
        ),
        example=(
            "torch says nothing. The doctor: `ranks 0, 1 wrote /run/checkpoint.pt at the same step 100: what is in "
            "it is chance`."
        ),
        depth=0,
    ),
    Code(
        code="CIUIC-I8",
        title="what was loaded is not what training began with",
        severity=Severity.CRITICAL,
        meaning=(
            "The checkpoint reached a copy, or something wrote over it: an initialisation after the load, a "
            "broadcast from a rank that had not loaded. The first forward pass used other weights."
        ),
        detection=(
            "A few elements of each parameter right after load_state_dict, against those in the first training "
            "forward pass: nine of ten parameters have changed. For an optimizer that owns copies of the weights "
            "(master weights): they differ from the model's by more than rounding before the first step. New heads "
            "on loaded bodies, and casts to another type, are not meant."
        ),
        fix=(
            "load last: after initialisation and before the wrapper; copy master weights back into the model after a "
            "load"
        ),
        fixes=(
            "```python\nwith torch.no_grad():\n    for parameter, master in zip(model.parameters(), "
            "masters):\n        parameter.copy_(master)\n```"
        ),
        example=(
            "torch says nothing. The doctor: `what was loaded from checkpoint.pt is in the optimizer's copy and not "
            "in the model: tokens.weight, mix.weight, mix.bias differ at the first forward pass`."
        ),
        explains=(
            "CIUIC-I2",
            "CIUIC-B1",
            "CIUIC-B2",
            "CIUIC-D1",
            "CIUIC-D4",
        ),
        depth=0,
    ),
)
