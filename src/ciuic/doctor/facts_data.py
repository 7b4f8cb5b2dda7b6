"""Names of facts about data and checkpoints: the probe's parts write them, the rules read them."""

FEED = "feed"
"""Of a record of the first optimizer: [source, batches so far, their newest digests of FEED_BYTES each, oldest first]
of at most FEED_SOURCES sources. Source 0: batches of data loaders that a backward pass followed; 1 + i: what model i
was given in training forward passes."""
FEED_BYTES, FEED_HELD, FEED_SOURCES = 4, 8, 3
PEERS = "data_peers"
"""Of a record: ranks that should read different data; empty: not known (tensor parallel); absent: all ranks."""
EPOCH = "epoch"
"""Of a record: the epoch of the sampler that shuffles and shares out."""

# ---- notices ----------------------------------------------------------------------------------------------------

LOADER = "loader"
"""Notice: a data loader that training uses {number, length, batch, samples, sampler, shuffle, drop_last, workers,
stream, split, replicas, place, seed, contents}. length: batches of one pass, -1: not known. split: `index` (the
sampler takes every `replicas`-th sample, from `place` on), `stream` (the same with a stream), or empty. contents: by
name of what the data set holds for each sample: [digest of some elements, 1 when these are numbers with a
fraction]. sharded: the data set itself is one share."""
LOADER_ENDS = "loader_ends"
"""Notice {number, batches, pass}: a pass over such a loader has ended."""
SAME_ORDER = "same_order"
"""Notice {sampler, epoch, batches, how}: a pass began in the order of the one before; how: `epoch` or `digests`."""
RESUMED_AT = "resumed_at"
"""Notice {steps, epoch, position, length, saved_epoch}: where the data began after a checkpoint was loaded."""
SHARED_MEMORY = "shared_memory"
"""Notice {free, wanted, workers}: bytes; the workers' batches may not fit into /dev/shm."""
LOADED = "loaded"
"""Notice: a state was loaded into a model {module, trained, given, own, used, used_share, unexpected, missing, prefix,
contents, number}: numbers of tensors, a few names, digest of what was loaded."""
NOT_RESTORED = "not_restored"
"""Notice {what, file, sure, why, saved, now}: what is `optimizer`, `scheduler` or `scaler`."""
UNTIED = "untied"
"""Notice {one, other, how}: two parameters that were, or should be, one."""
NOT_ACTIVE = "not_active"
"""Notice {names, count, total, how, file}: what was loaded is not what the first forward pass used."""
SAVED_TO = "saved_to"
"""Notice {path, digest}: torch.save wrote a file."""
