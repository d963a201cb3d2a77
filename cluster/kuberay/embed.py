"""Copy the Serve config that a RayService names into its ``serveConfigV2``.

    python cluster/kuberay/embed.py cluster/kuberay/*.yaml

A RayService holds the Serve config as text of its own. So that the two never differ, the file under
deployments/ is the source and this writes the copy; a test fails while they differ.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NAMES_CONFIG = re.compile(r"^ *dspark-ray/serve-config: (\S+)$", re.MULTILINE)
BLOCK = re.compile(r"^( *)serveConfigV2: \|\n((?:\1 +\S.*\n|\n)*)", re.MULTILINE)


def embed(manifest: str, root: Path = ROOT) -> str:
    """The manifest with the block below ``serveConfigV2`` replaced by the file that its annotation names.

    Manifests without that annotation come back unchanged.
    """
    named = NAMES_CONFIG.search(manifest)
    if named is None:
        return manifest
    config = (root / named.group(1)).read_text()

    def block(found: re.Match[str]) -> str:
        indent = found.group(1)
        lines = [f"{indent}  {line}".rstrip() for line in config.splitlines()]
        return f"{indent}serveConfigV2: |\n" + "\n".join(lines) + "\n"

    changed, count = BLOCK.subn(block, manifest)
    if count != 1:
        raise SystemExit(f"expected one serveConfigV2 block, found {count}")
    return changed


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        path.write_text(embed(path.read_text()))
