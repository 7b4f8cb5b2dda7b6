"""The communication hook for torch's DistributedDataParallel: gradients in few bits, with error feedback."""

from ciuic.train.ddp.hook import DdpCompression, compress_ddp
from ciuic.train.ddp.state import merge_ddp_states
from ciuic.train.ddp.wire import LinkSpeed

__all__ = ["DdpCompression", "LinkSpeed", "compress_ddp", "merge_ddp_states"]
