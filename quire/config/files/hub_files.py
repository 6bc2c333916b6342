"""What the headers of a checkpoint on the hub say, fetched as the few bytes they are."""

from __future__ import annotations

from quire.config.files.checkpoint_files import Stored
from quire.config.model import ModelConfig


def stored_on_hub(model: ModelConfig) -> Stored:
    """Nothing, if the hub cannot be reached or has no safetensors files of that name: a start says why."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, NotASafetensorsRepoError, SafetensorsParsingError

    try:
        found = HfApi(token=model.hf_token).get_safetensors_metadata(model.model, revision=model.revision)
    except (HfHubHTTPError, NotASafetensorsRepoError, SafetensorsParsingError, OSError, ValueError):
        return Stored()
    tensors = sum(len(file.tensors) for file in found.files_metadata.values())
    numbers = {str(dtype): count for dtype, count in found.parameter_count.items()}
    return Stored(files=len(found.files_metadata), tensors=tensors, numbers=numbers)
