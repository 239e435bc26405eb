"""What holds for every test: no hub, no state of the user or of a launcher, bounded threads, one cache folder for made models."""

import gc
import os
import shutil
import tempfile

# Before torch and transformers are imported: they read these once.
_HF_HOME = tempfile.mkdtemp(prefix="trl_fsdp_qlora_tests_")
THREADS = 1  # `test.sh` runs two workers, and some tests start ranks
os.environ.update(
    HF_HOME=_HF_HOME,  # neither the user's model and dataset caches nor their accelerate config
    HF_HUB_OFFLINE="1",
    TOKENIZERS_PARALLELISM="false",
    OMP_NUM_THREADS=str(THREADS),
    OMP_WAIT_POLICY="PASSIVE",  # threads that spin while they wait slow everything down on a busy machine
    MPLBACKEND="Agg",
)
for _name in list(os.environ):  # a shell that a launcher left behind must not make tests believe they are one of many ranks
    if _name.startswith(("ACCELERATE_", "FSDP_", "TORCHELASTIC_")) or _name in (
        *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
        *("HF_HUB_CACHE", "HF_DATASETS_CACHE", "TRANSFORMERS_CACHE"),
    ):
        del os.environ[_name]

import pytest  # noqa: E402
import torch  # noqa: E402

torch.set_num_threads(THREADS)


def pytest_report_header(config):
    from importlib.metadata import version

    packages = ("torch", "transformers", "trl", "peft", "accelerate", "bitsandbytes")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "none, tests marked gpu are skipped"
    return [", ".join(f"{name} {version(name)}" for name in packages), f"accelerator: {device}"]


def pytest_collection_modifyitems(config, items):
    # Files that take minutes start first, so that the two workers end together.
    folders = ("vllm", "distributed")
    items.sort(key=lambda item: folders.index(item.path.parent.name) if item.path.parent.name in folders else len(folders))
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs an accelerator")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


def pytest_collection_finish(session):
    # Trainers collect garbage, which walks all that was ever imported, a third of a second each time. That stays, so it is left out.
    gc.freeze()


def pytest_unconfigure(config):
    shutil.rmtree(_HF_HOME, ignore_errors=True)


@pytest.fixture(scope="session")
def model_cache(tmp_path_factory):
    """A folder for models that tests make: make each once, under a name of its own, and reuse it for the whole run."""
    return tmp_path_factory.mktemp("models")
