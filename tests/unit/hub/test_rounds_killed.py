from kill_cases import run_case


def test_a_hub_killed_at_any_write_point_goes_on_and_the_run_ends_as_if_nothing_had_happened() -> None:
    run_case("hub_is_killed_at_every_write_point")
