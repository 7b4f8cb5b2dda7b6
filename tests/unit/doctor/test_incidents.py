import msgspec
from hypothesis import given
from hypothesis import strategies as st

from ciuic.doctor.catalogue import codes
from ciuic.doctor.finding import Finding
from ciuic.doctor.incidents import fold

FINDINGS = st.lists(
    st.builds(
        Finding,
        code=st.sampled_from(sorted(codes())),
        cause=st.just("x"),
        step=st.integers(0, 30),
        modules=st.lists(st.sampled_from(["a", "b"]), max_size=1).map(tuple),
        confidence=st.floats(0.1, 1.0),
    ),
    max_size=8,
)


@given(FINDINGS)
def test_every_finding_is_in_one_incident_once(findings):
    incidents = fold(findings)
    told = [finding for incident in incidents for finding in (incident.cause, *incident.collateral)]
    assert all(finding.severity and finding.fix for finding in told)  # who reads them has no catalogue
    bare = [msgspec.structs.replace(finding, severity=None, fix="") for finding in told]
    assert sorted(map(repr, bare)) == sorted(map(repr, findings))


@given(FINDINGS, st.randoms())
def test_the_order_in_which_findings_come_does_not_matter(findings, random):
    mixed = list(findings)
    random.shuffle(mixed)
    causes = [(incident.cause.code, incident.cause.step) for incident in fold(findings)]
    assert [(incident.cause.code, incident.cause.step) for incident in fold(mixed)] == causes


def test_what_follows_from_a_cause_is_folded_under_it():
    codes_ = codes()
    cause = next(code for code in codes_.values() if code.explains)
    other = cause.explains[0]
    found = fold([Finding(code=other, cause="y", step=3), Finding(code=cause.code, cause="x", step=2)])
    assert [(each.cause.code, [c.code for c in each.collateral]) for each in found] == [(cause.code, [other])]


def test_a_consequence_long_before_its_supposed_cause_stands_alone():
    cause = next(code for code in codes().values() if code.explains)
    found = fold([Finding(code=cause.explains[0], cause="y", step=2), Finding(code=cause.code, cause="x", step=20)])
    assert len(found) == 2
