"""Read conversations about images of squares for a tiny vision-language model."""

from pathlib import Path

from wfm_ds.language.annotations import parse_conversation, read_rows
from wfm_ds.language.media import MediaReader
from wfm_ds.language.packed_sequences import ConversationReader
from wfm_ds.language.renderer import Renderer
from wfm_ds.recipe.data import DataRecipe

DATA = {"kind": "llava", "path": "x.json", "max_tokens": 128, "pixels": {"min": 1, "max": 56 * 56}}


def reader_of(model, **changes):
    data = DataRecipe.model_validate({**DATA, **changes})
    media, renderer = MediaReader(model.image_processor, data), Renderer(model.tokenizer)
    return ConversationReader(
        renderer, media, has_frame_times=model.has_frame_times, max_tokens=data.max_tokens, too_long=data.too_long
    )


def samples_of(model, folder, count=3, **changes):
    """Return the first `count` conversations of a dataset folder."""
    rows = list(read_rows(Path(folder) / "annotations.json"))[:count]
    return [reader_of(model, **changes).read(parse_conversation(row, name, root=str(folder))) for name, row in rows]
