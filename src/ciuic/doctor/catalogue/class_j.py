"""Class J: hang, order of calls."""

from ciuic.doctor.catalogue.code import Code
from ciuic.doctor.finding import Severity

_AFTER = ("CIUIC-J1", "CIUIC-J3", "CIUIC-J5", "CIUIC-J6", "CIUIC-J7")
_ENDS = ("CIUIC-J1", "CIUIC-J5", "CIUIC-J7")

CODES: tuple[Code, ...] = (
    Code(
        code="CIUIC-J1",
        title="a rank left the loop while the others still need it",
        severity=Severity.CRITICAL,
        meaning="One rank has ended, by itself or by an exception, and another one waits for it in a collective "
        "or fails because the connection is gone. Most often a rank has fewer batches than the others, "
        "stops by a decision of its own, or failed on its own data. torch only says that a connection was "
        "closed or that a wait timed out.",
        detection="A rank says goodbye at its end; the sign of life of another rank, or the phase in which that "
        "one ends, shows that it is inside a collective, a forward or a backward pass. Ranks that all "
        "end in order, or all by the same exception, give no finding; neither does a rank that nobody "
        "needs any more.",
        fix="give all ranks the same number of steps: drop_last, a sampler that pads, or torch's Join",
        fixes="Decide together: reduce the flag that ends the loop (`dist.all_reduce(flag, "
        "op=dist.ReduceOp.MAX)`) before anybody leaves. For uneven data:\n\n```python\nwith "
        "Join([ddp]):\n    for batch in loader: ...\n```\n",
        example="Rank 1 has 9 batches, rank 0 has 24. torch: `Connection closed by peer`. The doctor: `rank 1 "
        "ended after 9 steps; rank 0 needs it in DDP's broadcast of buffers at train.py:31 in main`.",
        explains=("CIUIC-J5", "CIUIC-J7"),
    ),
    Code(
        code="CIUIC-J2",
        title="ranks make different calls, or the same ones in another order",
        severity=Severity.CRITICAL,
        meaning="The n-th collective of a group must be the same one on all of its ranks. Here it is not: one "
        "rank left a call out, or made one more. Two calls may then meet that do not belong together (two "
        "barriers from different places), and the run stands still somewhere else, later, or goes on with "
        "wrong numbers.",
        detection="Each rank keeps a rolling digest of its calls by group (name, shapes, types, operation), with "
        "DDP's own broadcasts and reductions in their places. Digests of the same number are compared "
        "twice a second; when they differ the ranks tell their last calls, and the first difference is "
        "named, with both call sites. Where DDP's own calls are concerned, torch's Flight Recorder must "
        "agree. Shapes are not compared where ranks may differ (gather, all-to-all), sends and receives "
        "not at all, nothing under torch's Join.",
        fix="make every rank reach the call named here, or none of them",
        fixes="A rank that skips a batch must still take part: zero the loss (`loss = loss * 0`) instead of "
        "`continue`. Savers and evaluators with a barrier inside are called by all ranks, with the rank "
        "test inside:\n\n```python\nsave_checkpoint()          # all ranks; rank 0 writes\n```\n\nnot\n\n"
        "```python\nif rank == 0:\n    save_checkpoint()      # has a barrier inside\n```\n",
        example="Only rank 0 calls a saver that contains a barrier. torch, 30 minutes later: `Timed out waiting "
        "1800000 ms for recv`. The doctor, within a second: `from call 23 of the group on, ranks make "
        "different calls: rank 0 barrier at saving.py:12 in save; rank 1 DDP's broadcast of buffers at "
        "train.py:31 in main; rank 0 left its usual order`.",
        explains=("CIUIC-J4", *_AFTER),
        depth=0,
    ),
    Code(
        code="CIUIC-J3",
        title="a rank does something else while the others wait for it",
        severity=Severity.CRITICAL,
        meaning="The others are inside a collective; this rank has not come to it and has done the same thing for "
        "longer than ten usual steps: an endless loop, a lock, a data loader that does not deliver, a "
        "sleep. While the rank still makes progress it is slow, not dead, and the finding is a note or a "
        "warning; when the run goes on it becomes a note.",
        detection="Signs of life come twice a second from a thread of the doctor's own, with the phase, the stack "
        "and the processor time of the thread that trains. A wait is looked at after ten usual steps "
        "and at least 3 s (CIUIC_DOCTOR_HANG_S), before the first step three times as much. New lines "
        "in the stack, or other phases, mean progress. Long saves and loads are noted only.",
        fix="look at the place named here; make long work of one rank asynchronous, or raise the time-out of the group",
        fixes="A data loader that does not deliver: `DataLoader(..., timeout=60)` turns the silence into an error "
        "with a stack. Long work on rank 0 before the first step belongs before `init_process_group`.",
        example="`rank 1 makes no call and sleeps or waits for something else: in its other phase for 3.1 s, at "
        "train.py:44 in load; rank 0 waits in DDP's reduction of gradients (call 14) at train.py:50 in "
        "main for 3.0 s`.",
        explains=_ENDS,
    ),
    Code(
        code="CIUIC-J4",
        title="one collective has other shapes, types or operations on other ranks",
        severity=Severity.CRITICAL,
        meaning="All ranks are in the same collective with tensors that do not fit together. gloo aborts the "
        "process, NCCL hangs or mixes the bytes of different elements without a word.",
        detection="As CIUIC-J2: names are equal, shapes, types or operation differ, for collectives in which they "
        "must agree. A kind of call that a rank has not made before is announced before it is made, so "
        "that it is known even when it ends the process.",
        fix="give all ranks the same shape and type: pad, or exchange the sizes first",
        fixes="The last, smaller batch: `drop_last=True`. Lists of metrics: reduce one tensor with a fixed order "
        "of names on all ranks, with zeros where a rank has nothing.",
        example="`call 15 of the group has other tensors on other ranks: rank 0 all_reduce (float32[4] SUM) at "
        "train.py:60 in main; rank 1 all_reduce (float32[5] SUM) at train.py:60 in main`.",
        explains=_AFTER,
        depth=0,
    ),
    Code(
        code="CIUIC-J5",
        title="the process of a rank is gone without a word",
        severity=Severity.CRITICAL,
        meaning="A rank was killed (out of memory, a batch system, a signal) or crashed below Python. The others "
        "wait for it or fail with errors that name only a connection.",
        detection="The rank's connection to the doctor ended without last words, it did not come back, and other "
        "ranks wait in a call or failed in one afterwards. Ranks that all go at once without an error "
        "give no finding.",
        fix="look at the kernel's log (dmesg: out of memory) and the rank's last lines; ask for more memory or "
        "smaller batches",
        fixes="`dmesg -T | grep -i kill` on its host; exit code -9 is a kill, -7 a bus error (shared memory "
        "full), -11 a crash in native code (`PYTHONFAULTHANDLER=1` shows where), -6 an abort.",
        example="`the process of rank 1 is gone without a word at step 7: killed, out of memory or crashed; rank "
        "0 needs it in DDP's reduction of gradients at train.py:50 in main`.",
        explains=("CIUIC-J1", "CIUIC-J7"),
    ),
    Code(
        code="CIUIC-J6",
        title="a rank is stopped: its connection is open and nothing comes",
        severity=Severity.CRITICAL,
        meaning="The process is there and does not run: stopped by a signal (Ctrl-Z, a debugger, a batch system), "
        "swapped out, a frozen virtual machine or host, or native code that holds Python's lock. The "
        "others wait.",
        detection="No sign of life for more than 2 s from a rank whose connection is open, while others wait in a "
        "call. It is a warning at first, critical after four limits, and a note when the rank goes on. "
        "When the doctor itself stood still nothing is judged.",
        fix="look at the process on its host (`ps -o stat`): continue it with kill -CONT, or end the run",
        fixes="State T is stopped, D waits for a disk or network file system, S or R with a silent doctor means "
        "that one native call holds Python's lock.",
        example="`rank 1 gives no sign of life, though its connection is open: stopped, swapped out, or its host "
        "is frozen; last seen in other; rank 0 waits in DDP's broadcast of buffers (call 13) at "
        "train.py:50 in main for 3.2 s`.",
        explains=_ENDS,
    ),
    Code(
        code="CIUIC-J7",
        title="all ranks are in the same call and it does not end",
        severity=Severity.WARNING,
        meaning="Everybody has come, in the right order, and the collective makes no progress: a peer cannot be "
        "reached, a firewall drops packets, an interface is wrong, a link is broken or very slow.",
        detection="All ranks that are needed wait in the same call for longer than ten usual steps and at least 3 "
        "s, and their last calls are equal. Also when ranks end by errors of their connections and none "
        "is known to have left before.",
        fix="run `ciuic doctor preflight` on the nodes; check the interface that gloo or NCCL uses and the firewall",
        fixes="`GLOO_SOCKET_IFNAME` and `NCCL_SOCKET_IFNAME` choose the interface; both must name one on which "
        "the nodes reach each other.",
        example="`all ranks are in the same call and it does not end: rank 0 in all_reduce (call 12) at "
        "train.py:9 in main; rank 1 in all_reduce (call 12) at train.py:9 in main; a connection between "
        "them is broken or very slow`.",
        depth=2,
    ),
)
