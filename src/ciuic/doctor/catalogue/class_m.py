"""Class M: a ledger run of Ciuic."""

from ciuic.doctor.catalogue.code import Code
from ciuic.doctor.finding import Severity

CODES: tuple[Code, ...] = (
    Code(
        code="CIUIC-M1",
        title="the base of a node is not the hub's",
        severity=Severity.CRITICAL,
        meaning=(
            "After the same version all nodes must have the same bits. This node trains from another model, so what "
            "it pushes moves the others into a direction that was computed elsewhere."
        ),
        detection=(
            "Each report of a worker has the digest of its base and the version that it belongs to; the hub compares "
            "it with its own of that version, and two reports in a row must differ. A worker that has noticed itself "
            "that an entry came out different ends with CIUIC-403, starts again from a snapshot, and is counted here, "
            "too. Versions that the hub does not remember any more are not compared."
        ),
        fix="look at that node's memory, processor and versions (`ciuic doctor preflight`), and take it out of the run",
        fixes=(
            "`ciuic node drain NODE` takes it out. The others need nothing: the hub's ledger is right. A node on which "
            "this happens again and again has bad memory, or a library that does not compute as it should."
        ),
        example="`the base of node b came out different from the hub's once; its worker was started again`.",
        depth=0,
    ),
    Code(
        code="CIUIC-M2",
        title="the residual of a node grows",
        severity=Severity.WARNING,
        meaning=(
            "What compression leaves out is kept and added to the next push. When it grows from push to push, more is "
            "left out than the next pushes can carry: progress arrives late, or never."
        ),
        detection=(
            "The length of the residual over the length of what was to be pushed, of the latest pushes. It is told "
            "when the median of each third is twice that of the third before and the last is above 2. A residual "
            "that is long and stays so is usual for sparse codecs."
        ),
        fix="choose a finer codec: `ciuic sync RUN --compression int4`",
        fixes="A learning rate that is too high for that node's data has the same sign, on all codecs.",
        example="`the residual of node b grows: 1.3, then 7.4, then 18 times the length of a push`.",
    ),
    Code(
        code="CIUIC-M3",
        title="a node is always behind",
        severity=Severity.WARNING,
        meaning=(
            "Its steps begin from a base that the others have left. Its pushes count less, or are refused as stale, "
            "so a part of its work is for nothing."
        ),
        detection=(
            "Versions between its base and the hub's at each report. It is told when that is at least 4 in nine of "
            "ten of the latest 20 reports and three times that of the others. A joiner that catches up is not."
        ),
        fix="give it a larger interval or deadline, or a faster link: `ciuic sync RUN --interval N`",
        fixes="`ciuic status RUN` shows in `base` how far each node is behind, and what its link does.",
        example="`node b is 42 versions behind the hub all the time, the others 0`.",
    ),
    Code(
        code="CIUIC-M4",
        title="the loss of a node is far from the others'",
        severity=Severity.WARNING,
        meaning=(
            "All nodes train the same model, so with samples of the same kind their losses are alike. This node has "
            "other data, reads them otherwise (tokenizer, labels, order), or computes wrongly."
        ),
        detection=(
            "The median of the training loss in the latest reports of each node, against that of the others: more "
            "than 30 % and more than four of the nodes' own deviations apart, with at least 8 reports of each. Nodes "
            "with data of another kind on purpose show it, too."
        ),
        fix="compare that node's data with another node's: same files, same tokenizer, same preprocessing",
        fixes=(
            "`ciuic.doctor.replay` says whether the machines compute the same: "
            "[how to](../how-to/doctor-loss.md#nodes-of-a-ciuic-run)."
        ),
        example="`the loss of node b is 1.51, that of the other node 0.922`.",
    ),
    Code(
        code="CIUIC-M5",
        title="samples were trained twice, or are lost",
        severity=Severity.CRITICAL,
        meaning="Each sample number is to be trained once in a run. Some count twice in the model, or never.",
        detection=(
            "The hub's ledger of leased ranges: numbers that are in two merged pushes, and numbers that are neither "
            "merged nor free nor with a node. Both are 0 in every state of a run that is not damaged."
        ),
        fix="keep the run's folder and report this: neither may happen",
        example="`128 samples were trained twice, 0 are lost`.",
        depth=0,
    ),
)
