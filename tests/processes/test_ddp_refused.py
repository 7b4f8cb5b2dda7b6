"""compress_ddp says no, why, and what to do instead."""

from ddp_world import run_ranks


def test_what_cannot_work_is_refused_with_its_reason_and_a_way_out() -> None:
    told, other = run_ranks(2, "ddp_refused.cases")
    assert told == other
    taken = {name for name, text in told.items() if text == "taken"}
    assert taken == {"4-bit AdamW", "1-bit SGD"}
    for name, text in told.items():
        assert name in taken or "next: " in text, text
    expected = {
        "no DDP": ("CIUIC-104", "Linear is not a DistributedDataParallel"),
        "FSDP": ("CIUIC-104", "reduce-scatter does not pass"),
        "FSDP2": ("CIUIC-104", "reduce-scatter does not pass"),
        "apex": ("CIUIC-104", "torch.amp instead of Apex"),
        "sparse": ("CIUIC-104", "Embedding has sparse gradients"),
        "float64": ("CIUIC-104", "weight has gradients of float64"),
        "hook": ("CIUIC-104", "a communication hook already"),
        "built-in hook": ("CIUIC-104", "a communication hook already"),
        "twice": ("CIUIC-104", "a communication hook already"),
        "prepared": ("CIUIC-104", "already synchronised by run.prepare"),
        "codec": ("CIUIC-106", "no codec '3-bit'"),
        "auto codec": ("CIUIC-106", "automatic choice"),
        "topk": ("CIUIC-106", "top-k"),
        "form": ("CIUIC-104", "no form 'ring'"),
        "amsgrad": ("CIUIC-104", "amsgrad"),
        "1-bit Adam": ("CIUIC-104", 'codec="int4"'),
        "1-bit AdamW": ("CIUIC-104", "2.45 to 2.88 against 2.14"),
        "1-bit ZeRO": ("CIUIC-104", "1-bit gradients into AdamW"),
        "AdamW found at its first step": ("CIUIC-104", "1-bit gradients into AdamW"),
        "watch without DDP": ("CIUIC-104", "only synchronisation"),
    }
    assert set(expected) == set(told) - taken
    for name, (code, words) in expected.items():
        assert told[name].startswith(code), told[name]
        assert words in told[name], told[name]
