"""Makes `moerl/diagnostics/report/assets/vega.js` again: ``python -m scripts.vega_bundle`` (needs the dev extra).

The bundle is stored because making it takes seconds of CPU and a JavaScript engine of 84 MB, and every run writes a
page with it.
"""

from __future__ import annotations

import re
from pathlib import Path

VEGA_LITE = "6.4"
PATH = Path(__file__).parents[1] / "moerl/diagnostics/report/assets/vega.js"

_HEAD = """/*! Vega {vega}, Vega-Lite {vega_lite} and Vega-Embed {embed}, made by scripts/vega_bundle.py.
Copyright (c) 2013-2026 University of Washington Interactive Data Lab and contributors. BSD 3-Clause.
Contains parts of D3, copyright (c) 2010-2026 Mike Bostock, ISC. Texts of the licenses: vega.LICENSE.txt. */
"""


def bundle() -> str:
    """Vega, Vega-Lite and Vega-Embed as one script that defines them as globals.

    Raises:
        ValueError: it holds what would end the script element of a page.
    """
    import vl_convert

    text = vl_convert.javascript_bundle(vl_version=VEGA_LITE)  # pyright: ignore[reportCallIssue]
    if re.search(r"</script|<!--", text, re.IGNORECASE):
        raise ValueError("the bundle holds </script or <!--, and cannot be inlined as it is")
    head = _HEAD.format(
        vega=vl_convert.get_vega_version(), vega_lite=VEGA_LITE, embed=vl_convert.get_vega_embed_version()
    )
    return head + text.rstrip("\n") + "\n"


if __name__ == "__main__":
    PATH.write_text(bundle(), encoding="utf-8")
    print(f"{PATH}: {PATH.stat().st_size:,} bytes")
