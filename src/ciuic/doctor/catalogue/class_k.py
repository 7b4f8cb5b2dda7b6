"""Class K: network, launch, clock."""

from ciuic.doctor.catalogue.code import Code
from ciuic.doctor.finding import Severity

CODES: tuple[Code, ...] = (
    Code(
        code="CIUIC-K1",
        title="the network interface in the environment cannot be used",
        severity=Severity.CRITICAL,
        meaning=(
            "GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME names an interface that this machine does not have, that is "
            "down, or in the other library's syntax. The group is not formed, or the ranks wait for each other for "
            "ever."
        ),
        detection=(
            "The variables of each rank against the interfaces of its machine, by the libraries' own rules: gloo "
            "takes whole names; NCCL takes prefixes, `=` for whole names and `^` for those to leave out. `ciuic "
            "doctor preflight` says the same before the run, and which interface each library would take."
        ),
        fix="export GLOO_SOCKET_IFNAME=eth0, the interface between the nodes (`ip -br addr` lists them)",
        fixes="For both: `GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME==eth0`. Leave them unset on one machine.",
        example=(
            "`GLOO_SOCKET_IFNAME=^lo,docker`. torch: `Unable to find address for: ^lo`. The doctor: "
            "`GLOO_SOCKET_IFNAME=^lo,docker: gloo knows neither ^ nor =, those are NCCL's`."
        ),
        explains=(
            "CIUIC-J1",
            "CIUIC-J3",
            "CIUIC-J5",
            "CIUIC-J6",
            "CIUIC-J7",
        ),
        depth=0,
    ),
    Code(
        code="CIUIC-K2",
        title="the clock of a rank is wrong",
        severity=Severity.WARNING,
        meaning=(
            "Certificates look expired or not yet valid, logs and traces of the nodes do not fit together, the "
            "newest checkpoint by date is not the newest."
        ),
        detection=(
            "Each sign of life carries the rank's clock. What is on its way longer makes a clock look behind, so the "
            "least difference to the collector's clock counts; ranks whose clocks are 5 s apart are told. `ciuic "
            "doctor preflight` measures to a few milliseconds."
        ),
        fix="run an NTP client there (chronyc makestep, timedatectl set-ntp true)",
        example="torch says nothing. The doctor: `the clock of rank 1 is 900 s ahead of the others`.",
        depth=0,
    ),
    Code(
        code="CIUIC-K3",
        title="the ranks were not started alike",
        severity=Severity.CRITICAL,
        meaning=(
            "A rank has another model, another idea of how many ranks there are, or other versions. DDP ends all of "
            "them with one message, or tensors that do not belong together are reduced."
        ),
        detection=(
            "Names, shapes and types of the trainable parameters just before DistributedDataParallel is built, the "
            "number of ranks, and the versions of Python and torch (a warning), of all ranks. Stages of a pipeline "
            "have groups of their own and are compared inside these only."
        ),
        fix="start all ranks from the same code, configuration and environment",
        fixes=(
            "`ciuic doctor preflight --count FILE.py:FUNCTION` compares the model that each node builds before the run."
        ),
        example=(
            "torch, on all ranks: `DDP expects same model across all ranks, but Rank 1 has 16 params, while rank 0 "
            "has inconsistent 12 params`. The doctor: `rank 1 builds another model: 16 trainable tensors with 3112 "
            "elements, the others 12 with 1992, first in body.6`."
        ),
        explains=(
            "CIUIC-A6",
            "CIUIC-D1",
            "CIUIC-J1",
            "CIUIC-J2",
            "CIUIC-J3",
            "CIUIC-J4",
            "CIUIC-J5",
            "CIUIC-J6",
            "CIUIC-J7",
        ),
        depth=0,
    ),
)
