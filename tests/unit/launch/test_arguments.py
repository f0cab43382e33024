"""Options of commands, as their help shows them."""

from __future__ import annotations

import argparse

from moerl.launch.arguments import add_plan_arguments, options_text


def test_a_space_is_between_an_option_and_its_text_however_long_its_name_is() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    add_plan_arguments(parser, "run")
    lines = options_text(parser).splitlines()
    assert "  --engine-gb-per-second GB of its link to engines, 50 if not said" in lines
    assert "  --mfu SHARE           share of them that training reaches, 0.3 if not said" in lines
