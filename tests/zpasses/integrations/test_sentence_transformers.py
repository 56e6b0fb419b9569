"""SentenceTransformerTrainer trains, saves and resumes a prepared model as with DDP."""

import contextlib
import io

import pytest
import torch

from zpasses.testing import run_on_ranks

sentence_transformers = pytest.importorskip("sentence_transformers", minversion="6.0")
transformers = pytest.importorskip("transformers", minversion="5.0")
datasets = pytest.importorskip("datasets")
tokenizers = pytest.importorskip("tokenizers")

from sentence_transformers.sentence_transformer import losses, modules  # noqa: E402

from tests.models.families import of_transformers  # noqa: E402
from tests.models.sizes import NO_DROPOUT, WIDTHS  # noqa: E402
from tests.zpasses.integrations import training  # noqa: E402
from zpasses.integrations.transformers import prepare  # noqa: E402

pytestmark = pytest.mark.processes
WORDS = [chr(97 + i) for i in range(26)]


def _save_parts(folder):
    """The model and the tokenizer that a SentenceTransformer starts from."""
    words = {each: i for i, each in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS])}
    fast = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    fast.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=fast, pad_token="[PAD]", unk_token="[UNK]", model_max_length=16
    ).save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {**WIDTHS, **NO_DROPOUT, "hidden_size": 12, "max_position_embeddings": 16}
    of_transformers("BertModel", **sizes, vocab_size=len(words)).save_pretrained(folder)


def _model(parts):
    transformer = modules.Transformer(str(parts))
    pooling = modules.Pooling(12)
    torch.manual_seed(1)
    dense = modules.Dense(12, 7)
    return sentence_transformers.SentenceTransformer(
        modules=[transformer, pooling, dense], device="cpu"
    )


def _train(folder, parts, prepared, resume=None, **changes):
    training.as_started_by_torchrun()
    datasets.disable_progress_bars()
    args = training.arguments(
        folder, kind=sentence_transformers.SentenceTransformerTrainingArguments, **changes
    )
    model = _model(parts)
    if prepared:
        prepare(model, options=training.OPTIONS)
    texts = [
        [" ".join(WORDS[(i * j + k) % 26] for j in range(4)) for i in range(16)] for k in (0, 5)
    ]
    columns = {"first": texts[0], "second": texts[1], "score": [i % 2 * 1.0 for i in range(16)]}
    trainer = sentence_transformers.SentenceTransformerTrainer(
        model,
        args,
        train_dataset=datasets.Dataset.from_dict(columns),
        loss=losses.CosineSimilarityLoss(model),
    )
    with contextlib.redirect_stdout(io.StringIO()):
        training.quiet(trainer).train(resume_from_checkpoint=resume)
    return model, training.logged(trainer, "loss", "grad_norm")


def _checkpoints(folder):
    saves = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    parts = folder / "parts"
    _, plain = _train(folder / "plain", parts, False, max_steps=4, ddp_find_unused_parameters=True)
    model, ours = _train(folder / "ours", parts, True, **saves)
    _, resumed = _train(
        folder / "ours", parts, True, resume=str(folder / "ours/checkpoint-2"), **saves
    )
    assert ours == pytest.approx(plain, rel=1e-5)
    assert resumed == ours
    model.save_pretrained(str(folder / "final"))
    for path in (folder / "final", folder / "ours" / "checkpoint-4"):
        loaded = sentence_transformers.SentenceTransformer(str(path), device="cpu")
        torch.testing.assert_close(
            loaded.encode(WORDS[:3], convert_to_tensor=True, show_progress_bar=False),
            model.encode(WORDS[:3], convert_to_tensor=True, show_progress_bar=False),
        )


@pytest.mark.slow(quick="test_tasks_train_like_ddp_and_reduce_once_per_step")
def test_sentence_transformer_trains_saves_and_resumes(tmp_path):
    _save_parts(tmp_path / "parts")
    run_on_ranks(_checkpoints, tmp_path)
