"""What is fuzzed: every way in for bytes from outside. Each target takes one case and says `valid` or `refused`.

Any other exception than a CiuicError is a fault. Frames whose bytes were changed must be refused: they carry a digest.
A changed message that still is a message is no fault: it must come out again as it went in.
"""

import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
from cryptography.utils import CryptographyDeprecationWarning
from fuzz_values import as_json, as_msgpack, mangled, mutated, valid

from ciuic.errors import CertificateError, CiuicError, FrameError, LedgerDamagedError, TokenError
from ciuic.job import load_job
from ciuic.ledger import entry as e
from ciuic.ledger import journal as j
from ciuic.ledger.frame import Kind, build_frame, read_frame
from ciuic.ledger.layout import Layout, Tensor, layout_from_dict, make_layout
from ciuic.net import access_messages, messages, shard_messages, store_messages
from ciuic.net.chunks import ChunkList, Manifest, decode_manifest, encode_manifest, manifest_of
from ciuic.net.tls import Authority, check_issued, identity_from_der, new_key_and_csr, pem_fingerprint, pem_to_der
from ciuic.net.tokens import make_token, parse_token
from ciuic.net.url import parse_hub_url

Outcome = Literal["valid", "refused"]
ELEMENTS = 64
JOBS = (
    'name = "x"\n[sync]\ninterval = 8\ncompression = { up = "1-bit", down = "int4" }\n[nodes]\nmin = 2\n',
    '[model]\npreset = "deepseek-v3-tiny"\n[data]\npath = ["a", "b"]\n[train]\nsamples = 9\n[fault]\ngrace = "10 s"\n',
    '[optim]\nlr = 1e-3\nbetas = [0.9, 0.99]\noptimizer = "muon"\n[security]\noutliers = "clip"\nfactor = 10\n',
)
JOB_WORDS = ("[", "]", "=", '"', "{", "}", "'''", "nan", "-", "1e999", "0x", "\n", ".", "#", "true", "1979-05-27")


class Fault(AssertionError):  # noqa: N818 - what is found, not an error of the finder
    """What must not be."""


class Targets:
    """All of them, with their seeds. `cases(name)` runs one case of a target."""

    def __init__(self, folder: Path, seed: int) -> None:
        """`folder`: for job files; a memory file system is fast."""
        self.draw = random.Random(seed)
        self._job = folder / "job.toml"
        self._kinds = [*_messages(messages, access_messages, store_messages), *_messages(shard_messages)]
        self._frames = _frames()
        self._headers: list[tuple[Kind, type]] = [
            ("push", e.PushHeader),
            ("entry", e.EntryHeader),
            ("snapshot", e.SnapshotHeader),
        ]
        self._layout = msgspec.to_builtins(_layout())
        self._authority = Authority.create(folder / "authority")
        self._pair = new_key_and_csr()
        self._cert, _ = self._authority.issue_client(self._pair[1], common_name="us-west", role="node")
        self._token = make_token(url="https://hub:8443", authority_fingerprint="a" * 64, id="1f", secret="s" * 43)
        self._manifest = manifest_of(bytes(range(256)) * 40, "push", 0)
        self.weights: dict[str, int] = {
            "messages": 46,
            "frames": 16,
            "headers": 12,
            "records": 4,
            "layouts": 6,
            "chunks": 4,
            "tokens": 4,
            "urls": 3,
            "jobs": 3,
            "certificates": 2,
        }
        self._run: dict[str, Callable[[], Outcome]] = {name: getattr(self, f"_{name}_case") for name in self.weights}

    def names(self) -> Iterator[str]:
        """Target names for ever, each as often as its weight says."""
        names, weights = list(self.weights), list(self.weights.values())
        while True:
            yield from self.draw.choices(names, weights, k=1000)

    def case(self, name: str) -> Outcome:
        """One case. Raises Fault, or whatever the code under test raises."""
        return self._run[name]()

    # ---- control messages

    def _messages_case(self) -> Outcome:
        kind = self.draw.choice(self._kinds)
        value = valid(kind, self.draw)
        for _ in range(self.draw.randrange(4)):
            value = mutated(value, self.draw)
        body = as_json(value)
        if self.draw.random() < 0.25:
            body = mangled(body, self.draw)
        try:
            found = messages.decode(body, kind)
        except CiuicError:
            return "refused"
        again = messages.decode(messages.encode(found), kind)
        if again != found:
            raise Fault(f"{kind.__name__} does not come out as it went in: {body[:300]!r}")
        return "valid"

    # ---- frames

    def _frames_case(self) -> Outcome:
        kind, frame, read = self.draw.choice(self._frames)
        changed = mangled(frame, self.draw)
        try:
            read(changed)
        except (FrameError, LedgerDamagedError):
            return "refused"
        raise Fault(f"a changed {kind} was accepted: {changed[:200]!r}")

    def _headers_case(self) -> Outcome:
        """A frame whose digest is right, around a header that nobody should believe."""
        kind, header_type = self.draw.choice(self._headers)
        header = valid(header_type, self.draw)
        for _ in range(self.draw.randrange(3)):
            header = mutated(header, self.draw)
        body = as_msgpack(header)
        if self.draw.random() < 0.2:
            body = mangled(body, self.draw)
        frame = build_frame(kind, body, self.draw.randbytes(self.draw.choice([0, 4 * ELEMENTS, 17])))
        read = {"push": e.push_from_frame, "entry": e.entry_from_frame, "snapshot": _read_snapshot}[kind]
        return _tried(lambda: read(frame))

    def _records_case(self) -> Outcome:
        """A record of a journal."""
        record = as_msgpack(mutated(valid(j.Record, self.draw), self.draw))
        frame = build_frame("record", record)
        if self.draw.random() < 0.5:
            frame = mangled(frame, self.draw)
        return _tried(lambda: _read_record(frame))

    # ---- the rest

    def _layouts_case(self) -> Outcome:
        body: Any = valid(Layout, self.draw) if self.draw.random() < 0.3 else self._layout
        for _ in range(self.draw.randrange(1, 4)):
            body = mutated(body, self.draw)

        def read() -> None:
            layout = layout_from_dict(body)
            for fragment in range(layout.fragment_count):
                layout.fragment_shape(fragment)
            layout.digest  # noqa: B018 - it must be computable

        return _tried(read)

    def _chunks_case(self) -> Outcome:
        if self.draw.random() < 0.5:
            packed = mangled(encode_manifest(self._manifest)[4:], self.draw)
        else:
            packed = as_msgpack(mutated(valid(Manifest, self.draw), self.draw))

        def read() -> None:
            found = decode_manifest(packed, 1 << 30)
            start, stop = found.span(found.count - 1)
            if not 0 <= start < stop <= 1 << 30:
                raise Fault(f"a list of chunks ends at {stop}")

        def listed() -> None:
            messages.decode(as_json(mutated(valid(ChunkList, self.draw), self.draw)), ChunkList).check(1 << 20)

        return _tried(read) if self.draw.random() < 0.7 else _tried(listed)

    def _tokens_case(self) -> Outcome:
        text = mangled(self._token.encode(), self.draw).decode(errors="replace")
        try:
            found = parse_token(text)
        except TokenError as error:
            if "s" * 20 in str(error):
                raise Fault("a refused token shows its secret") from error
            return "refused"
        return "valid" if found.url else "refused"

    def _urls_case(self) -> Outcome:
        text = mangled(b"https://hub.example.org:8443", self.draw).decode(errors="replace")
        return _tried(lambda: parse_hub_url(parse_hub_url(text).url))

    def _jobs_case(self) -> Outcome:
        text = self.draw.choice(JOBS)
        for _ in range(self.draw.randrange(1, 5)):
            place = self.draw.randrange(len(text) + 1)
            if self.draw.random() < 0.6:
                text = text[:place] + self.draw.choice(JOB_WORDS) + text[place + self.draw.randrange(3) :]
            else:
                text = mangled(text.encode(), self.draw).decode(errors="replace")
        if self.draw.random() < 0.01:
            text = "a = " + "[" * self.draw.choice([100, 3000])
        self._job.write_bytes(text.encode(errors="replace"))
        return _tried(lambda: load_job(self._job))

    def _certificates_case(self) -> Outcome:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CryptographyDeprecationWarning)  # what it will refuse later, is refused too
            return self._certificate()

    def _certificate(self) -> Outcome:
        which = self.draw.randrange(4)
        if which == 0:
            csr = _mangled_pem(self._pair[1], self.draw)
            return _tried(lambda: self._authority.issue_client(csr, common_name="x", role="node"))
        pem = _mangled_pem(self._cert, self.draw)
        if which == 1:
            return _tried(lambda: pem_fingerprint(pem))
        if which == 2:
            return _tried(lambda: identity_from_der(pem_to_der(pem)))
        authority, key = self._authority.certificate_pem, self._pair[0]
        try:
            found = check_issued(pem, authority_pem=authority, key_pem=key)
        except CertificateError:
            return "refused"
        if (found.name, found.role) != ("us-west", "node"):
            raise Fault(f"a changed certificate is believed: {found}")
        return "valid"  # what was changed is not part of what is signed (spaces, text around it)


def _tried(work: Callable[[], object]) -> Outcome:
    try:
        work()
    except CiuicError:
        return "refused"
    return "valid"


def _messages(*modules: Any) -> list[type]:
    """Every message class of these modules."""
    found = {
        kind
        for module in modules
        for kind in vars(module).values()
        if isinstance(kind, type)
        and issubclass(kind, msgspec.Struct)
        and kind.__module__ == module.__name__
        and kind.__struct_fields__
    }
    return sorted(found, key=lambda kind: (kind.__module__, kind.__name__))


def _mangled_pem(pem: bytes, draw: random.Random) -> bytes:
    """Changed as text, or inside (where only a parser of DER sees it)."""
    import base64

    if draw.random() < 0.4:
        return mangled(pem, draw)
    lines = pem.split(b"\n")
    der = mangled(base64.b64decode(b"".join(lines[1:-2])), draw)
    return b"\n".join([lines[0], base64.encodebytes(der).strip(), lines[-2], b""])


def _layout() -> Layout:
    return make_layout(
        [
            Tensor(name="embed", shape=(32, 64), dtype="float32", section="coded", row_aligned=True),
            Tensor(name="norm", shape=(64,), dtype="float32", section="small"),
            Tensor(name="count", shape=(), dtype="int64", section="counter"),
        ]
    )


def _read_snapshot(frame: bytes) -> e.Snapshot:
    return e.snapshot_from_frame(frame, ELEMENTS)


def _read_record(frame: bytes) -> object:
    """As Journal.records does."""
    try:
        return msgspec.msgpack.decode(read_frame(frame, "record").header, type=j.Record)
    except msgspec.DecodeError as error:
        raise LedgerDamagedError("the journal holds a record of another version", cause=str(error)) from error


def _frames() -> list[tuple[Kind, bytes, Callable[[bytes], object]]]:
    """Real frames, and how they are read."""
    push = e.PushHeader(
        run="r",
        node="us-west",
        incarnation=1,
        sequence=3,
        fragment=0,
        base_version=2,
        epoch=1,
        tokens=4096,
        ranges=((0, 8), (16, 24)),
        codec="1-bit",
        layout_digest="0" * 32,
    )
    entry = e.EntryHeader(
        run="r",
        fragment=0,
        version=3,
        codec="1-bit",
        epoch=1,
        contributors=(e.Contributor(node="a", incarnation=1, sequence=1, tokens=5, weight=0.5, payload_bytes=9),),
        outer_lr=1.0,
        outer_momentum=0.0,
        digest="1" * 32,
        previous_digest="2" * 32,
    )
    snapshot = e.SnapshotHeader(
        run="r", fragment=0, version=0, layout_digest="0" * 32, digest="3" * 32, parts=("base",)
    )
    payload = np.arange(100, dtype=np.uint8)
    vectors = {"base": np.linspace(-1, 1, ELEMENTS, dtype=np.float32)}
    record = build_frame("record", msgspec.msgpack.encode(j.Revived(node="us-west")))
    return [
        ("push", e.Push(header=push, payload=payload).to_frame(), e.push_from_frame),
        ("entry", e.Entry(header=entry, payload=payload).to_frame(), e.entry_from_frame),
        ("snapshot", e.Snapshot(header=snapshot, vectors=vectors).to_frame(), _read_snapshot),  # type: ignore[arg-type]
        ("record", record, _read_record),
    ]
