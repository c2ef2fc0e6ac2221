import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from helpers import noise

from cmsf.method.losses import PAWS
from cmsf.recipes import BASELINES, METHODS, NAMES, OURS, SCALES, VARIANTS, explain, get_recipe
from cmsf.recipes.recipe import Recipe, ResolvedRecipe, parse_value
from cmsf.training.resolve import resolve
from cmsf.utils.errors import BadInput


def test_every_method_comes_at_every_scale_and_survives_being_saved() -> None:
    assert len(NAMES) == len(METHODS) * len(SCALES)
    for name in NAMES:
        recipe = get_recipe(name)
        assert recipe.name == name
        assert Recipe.from_yaml(recipe.to_yaml(), "test") == recipe


def test_the_imagenet_scale_is_the_papers() -> None:
    recipe = get_recipe("cmsf-self-imagenet")
    assert (recipe.backbone, recipe.size, recipe.bank_size, recipe.batch_size) == ("resnet50", 224, 128_000, 256)
    assert (recipe.epochs, recipe.lr, recipe.sgd_momentum, recipe.weight_decay) == (200, 0.05, 0.9, 1e-4)
    assert (recipe.target_momentum, recipe.target_momentum_end) == (0.99, 0.99)
    assert (recipe.k, recipe.companion_k, recipe.unconstrained_weight) == (5, 5, 0.5)
    assert (recipe.jitter, recipe.greyscale, recipe.blur, recipe.solarise) == (0.8, 0.2, 0.5, 0)
    assert (recipe.brightness, recipe.contrast, recipe.saturation, recipe.hue) == (0.4, 0.4, 0.4, 0.1)
    assert (
        get_recipe("cmsf-sup-imagenet").k,
        get_recipe("cmsf-sup-all-imagenet").k,
        get_recipe("byol-imagenet").k,
    ) == (10, "all", 1)


def test_methods_at_one_scale_differ_in_the_objective_alone() -> None:
    objective = {"name", "constraint", "k", "companion_k", "unconstrained_weight", "pseudo_labels", "keep"}
    for scale in SCALES:
        base = get_recipe(f"msf-{scale}")
        for method in OURS:
            for difference in get_recipe(f"{method}-{scale}").differences(base):
                assert difference.split(":")[0] in objective


@pytest.mark.parametrize("scale", ["small", "standard"])
def test_a_baseline_has_the_network_views_and_schedule_of_its_scale(scale: str) -> None:
    """It differs by its objective, by which views it compares, and by what is part of the method alone."""
    objective = {"name", "objective", "temperature", "bank_size", "support_classes", "pseudo_threshold"}
    of_the_method = {"simsiam": {"projection_layers", "projection_norm"}, "supcon": {"warmup_epochs"}}
    base = get_recipe(f"msf-{scale}")
    for method in BASELINES:
        changed = {difference.split(":")[0] for difference in get_recipe(f"{method}-{scale}").differences(base)}
        assert changed <= objective | {"first_view", "second_view"} | of_the_method.get(method, set())
        assert "objective" in changed


LARGE_BATCH = {"optimiser": "lars", "batch_size": 4096, "warmup_epochs": 10}
LOUD = {"brightness": 0.8, "contrast": 0.8, "saturation": 0.8, "hue": 0.2}
# From each method's own paper, or its authors' code where that says more.
OF_THEIR_PAPERS = {
    "supcon": {"temperature": 0.1, "projection_dim": 128, "projection_hidden": 2048, "bank_size": 128_000},
    "moco-v2": {
        "temperature": 0.2, "bank_size": 65_536, "target_momentum": 0.999, "target_momentum_end": 0.999, "lr": 0.03,
        "weight_decay": 1e-4, "batch_size": 256, "projection_hidden": 2048, "projection_dim": 128,
    },
    "nnclr": {
        **LARGE_BATCH, "temperature": 0.1, "bank_size": 98_304, "projection_layers": 3, "projection_norm": True,
        "projection_hidden": 2048, "projection_dim": 256, "prediction_hidden": 4096, "lr": 4.8, "weight_decay": 1e-6,
    },
    "simclr": {
        **LARGE_BATCH, **LOUD, "temperature": 0.1, "strong_crop": 0.08, "projection_hidden": 2048,
        "projection_dim": 128, "lr": 4.8, "weight_decay": 1e-6,
    },
    "byol-sym": {
        **LARGE_BATCH, "projection_hidden": 4096, "projection_dim": 256, "lr": 3.2, "weight_decay": 1.5e-6,
        "target_momentum": 0.996, "target_momentum_end": 1.0, "strong_crop": 0.08, "saturation": 0.2, "hue": 0.1,
    },
    "simsiam": {
        "projection_layers": 3, "projection_norm": True, "projection_hidden": 2048, "projection_dim": 2048,
        "prediction_hidden": 512, "lr": 0.05, "batch_size": 256, "optimiser": "sgd", "weight_decay": 1e-4,
    },
    "isd": {
        "temperature": 0.1, "target_temperature": 0.01, "bank_size": 128_000, "target_momentum": 0.99, "lr": 0.05,
        "first_view": "weak", "second_view": "strong",
    },
    "paws": {
        **LARGE_BATCH, **LOUD, "temperature": 0.1, "sharpening": 0.25, "support_classes": 960, "support_images": 7,
        "extra_crops": 6, "projection_layers": 3, "projection_hidden": 2048, "projection_dim": 2048,
        "prediction_hidden": 512, "lr": 6.4, "weight_decay": 1e-6, "epochs": 300,
    },
    "paws+support-400": {"support_classes": 200, "support_images": 2, "batch_size": 256, "epochs": 100, "lr": 0.4},
    "fixmatch": {
        "batch_size": 5120, "support_images": 1024, "pseudo_threshold": 0.7, "unlabelled_weight": 10, "lr": 0.4,
        "warmup_epochs": 5, "weight_decay": 3e-4, "epochs": 300, "second_view": "rand-augment",
    },
}  # fmt: skip


@pytest.mark.parametrize("method", OF_THEIR_PAPERS)
def test_at_the_papers_scale_a_baseline_has_its_own_papers_settings(method: str) -> None:
    recipe = get_recipe(f"{method}-imagenet")
    assert {name: getattr(recipe, name) for name in OF_THEIR_PAPERS[method]} == OF_THEIR_PAPERS[method]


def test_smaller_scales_have_what_the_papers_have_for_small_images() -> None:
    fixmatch, isd, paws = get_recipe("fixmatch-small"), get_recipe("isd-small"), get_recipe("paws-small")
    assert (fixmatch.pseudo_threshold, fixmatch.unlabelled_weight) == (0.95, 1)
    assert (isd.temperature, isd.target_temperature) == (0.02, "auto")
    assert PAWS(paws.temperature, paws.sharpening) == PAWS(temperature=0.1, sharpening=0.25, smoothing=0.1)


def test_a_recipe_file_is_found_in_ones_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine.yaml").write_text(get_recipe("msf-small").to_yaml())
    assert get_recipe("~/mine.yaml") == get_recipe("msf-small")
    with pytest.raises(BadInput, match=r"no such recipe file: ~/other\.yaml"):
        get_recipe("~/other.yaml")


def test_a_variant_changes_what_it_says_and_variants_add_up() -> None:
    for name, variant in VARIANTS.items():
        for method in variant.methods:
            plain, changed = get_recipe(f"{method}-imagenet"), get_recipe(f"{method}+{name}-imagenet")
            changes = variant.changes | variant.at_paper_scale | {"name": f"{method}+{name}-imagenet"}
            assert changed == plain.changed(changes)
    both = get_recipe("supcon+standard-views+without-target+bank-16k-imagenet")
    assert (both.first_view, both.second_view, both.weak_crop) == ("weak", "weak", 0.08)
    assert (both.include_query, both.bank_size) == (False, 16_000)
    assert get_recipe("cmsf-sup+noise-50", small_images=True) == get_recipe("cmsf-sup+noise-50-small")
    assert [get_recipe(f"cmsf-sup+top-{k}-small").k for k in (1, 2, 10, 20, 1000, "all")] == [1, 2, 10, 20, 1000, "all"]
    assert "50 % of the labels" in explain("xent+noise-50")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cmsf-sup+noise-15", "unknown variant 'noise-15'; did you mean"),
        ("cmsf-supp+coarse", "unknown recipe 'cmsf-supp+coarse'; did you mean"),
        ("+coarse", "unknown recipe '+coarse'"),
        ("cmsf-sup+", "unknown variant ''"),
        ("cmsf-sup+noise-5+noise-50", "+noise-5 and +noise-50 both set label_noise; use one of them"),
        ("cmsf-sup-small+noise-50", "did you mean cmsf-sup+noise-50-small?"),
        ("simclr+top-20", "simclr does not use +top-20; it is for cmsf-sup, cmsf-sup-all, cmsf-semi"),
        ("simsiam+bank-16k-small", "simsiam does not use +bank-16k"),
    ],
)
def test_a_name_that_is_none_is_refused_with_the_nearest(name: str, message: str) -> None:
    with pytest.raises(BadInput, match=re.escape(message)):
        get_recipe(name, small_images=True)


def test_a_bare_method_takes_its_scale_from_the_images() -> None:
    assert get_recipe("msf", small_images=True).name == "msf-small"
    assert get_recipe("msf", small_images=False).name == "msf-standard"


def test_every_field_and_method_is_explained() -> None:
    assert all(field.metadata["help"] for field in fields(Recipe))
    assert all(len(explain(method)) > 80 for method in METHODS)


@pytest.mark.parametrize(
    ("flag", "text", "message"),
    [
        ("epochs", "-1", "--epochs -1 is out of range; use at least 0"),
        ("epochs", "2.5", "invalid value --epochs 2.5; expected a whole number"),
        ("lr", "fast", "invalid value --lr fast; expected a number"),
        ("lr", "nan", "invalid value --lr nan; expected a number"),
        ("lr", "inf", "invalid value --lr inf; expected a number"),
        ("k", "[", "expected a whole number or all"),
        ("epochs", "1:01", "expected a whole number"),
        ("seed", "9" * 30, "expected a whole number"),
        ("size", "100000000", "at most 1024"),
        ("k", "some", "expected a whole number or all"),
        ("k", "true", "expected a whole number or all"),
        ("constraint", "labels", "expected none or label or companion"),
        ("target_momentum", "1.1", "use at least 0, at most 1"),
        ("include_query", "maybe", "expected true or false"),
        ("weak_crop", "0", "use above 0, at most 1"),
    ],
)
def test_a_wrong_value_is_refused_with_what_would_do(flag: str, text: str, message: str) -> None:
    with pytest.raises(BadInput) as refusal:
        Recipe().changed({flag: parse_value(flag, text)})
    assert message in str(refusal.value)


@pytest.mark.parametrize(
    ("flag", "text", "value"), [("lr", "1e-3", 0.001), ("k", "all", "all"), ("bank_size", "auto", "auto")]
)
def test_flags_are_read_as_what_they_stand_for(flag: str, text: str, value: object) -> None:
    assert parse_value(flag, text) == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("epochs: [1", "is not valid YAML"),
        ("- 1", "is not a recipe"),
        ("1: 2", "is not a recipe"),
        ("epoch: 3", "did you mean epochs"),
        ("name: ../../elsewhere", "cannot be called"),
        ("!!python/object/apply:os.system ['true']", "is not valid YAML"),
    ],
)
def test_a_file_that_is_no_recipe_is_refused(text: str, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        Recipe.from_yaml(text, "my.yaml")


def test_a_recipe_of_a_run_that_lacks_a_setting_is_of_another_version() -> None:
    resolved = resolve(get_recipe("msf-small"), noise(72, 8), 30)
    lines = [line for line in resolved.to_yaml().splitlines() if not line.startswith("support_images")]
    with pytest.raises(BadInput, match="lacks support_images: another version of cmsf wrote it"):
        ResolvedRecipe.from_yaml("\n".join(lines), "run/recipe.yaml")
    assert ResolvedRecipe.from_yaml(resolved.to_yaml(), "run/recipe.yaml") == resolved


def test_a_bank_that_no_memory_holds_is_refused_unless_enough_processes_share_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recipe, data = (
        replace(get_recipe("msf-small"), projection_hidden=2, prediction_hidden=2, projection_dim=1000),
        noise(72, 8),
    )
    rows = 4 * 72 * 1000
    monkeypatch.setattr("cmsf.training.resolve.available_memory", lambda: rows)
    with pytest.raises(BadInput, match="72 rows of a bank take"):
        resolve(recipe, data, 30)
    resolve(recipe, data, 30, processes=1, bank_shares=2)
    with pytest.raises(BadInput, match=r"36 rows of a bank take .* in 2 processes"):
        resolve(recipe, data, 30, processes=2, bank_shares=2)  # both on this machine


def test_a_baselines_description_says_whose_settings_it_has() -> None:
    assert "These are the settings of -imagenet; those of -small follow." in explain("simclr-small")
    assert "follow" not in explain("simclr-imagenet") + explain("simclr") + explain("msf-small")


def test_eighty_photos_just_work() -> None:
    photos = noise(72, 8)
    recipe = resolve(get_recipe("cmsf-self-standard"), photos, median_side=600)
    assert (recipe.bank_size, recipe.batch_size, recipe.size) == (72, 16, 128)
    assert (recipe.projection_hidden, recipe.projection_dim) == (1024, 128)
    assert resolve(replace(get_recipe("msf-small"), batch_size=10), photos, 30).size == 30
    supcon = get_recipe("supcon-standard").changed({"backbone": "small-residual"})  # ten of 200 epochs, as in the paper
    assert [resolve(replace(supcon, epochs=n), photos, 30).warmup_epochs for n in (200, 30, 8)] == [10, 1, 0]


@pytest.mark.parametrize(
    ("american", "name", "value"),
    [
        ("optimizer", "optimiser", "lars"),
        ("grayscale", "greyscale", 0.7),
        ("solarize", "solarise", 0.3),
        ("unlabeled_weight", "unlabelled_weight", 2.0),
    ],
)
def test_a_field_is_taken_in_both_spellings(american: str, name: str, value: Any) -> None:
    recipe = Recipe().changed({american: value})
    assert getattr(recipe, name) == value
    assert recipe == Recipe().changed({name: value}) == Recipe().changed({name: value, american: value})
    assert american not in recipe.to_yaml()
    with pytest.raises(BadInput, match=f"{american}={value} and {name}=.* are the same setting; give one"):
        Recipe().changed({american: value, name: getattr(Recipe(), name)})
    assert Recipe.from_yaml(f"{american}: {value}", "a file") == recipe


def test_the_cache_and_the_companions_count_towards_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = replace(get_recipe("cmsf-self-small"), projection_hidden=2, prediction_hidden=2, projection_dim=1000)
    data, row = noise(72, 8), 4 * 1000
    free = 3 * 72 * row  # of each image a row in the bank, its companion, and its row in the cache
    monkeypatch.setattr("cmsf.training.resolve.available_memory", lambda: free)
    with pytest.raises(BadInput, match="72 rows of a bank with companions of 72 images take"):
        resolve(recipe, data, 30)
    heads = 16 * (3 * 64 * 2 + 2 * 2 * 1000 + 2 * 1000 * 2)
    monkeypatch.setattr("cmsf.training.resolve.available_memory", lambda: free + heads)
    resolve(recipe, data, 30)
    resolve(replace(recipe, companions="third-view"), data, 30, bank_shares=1)


def test_a_recipe_in_ones_home_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine.yaml").write_text(replace(get_recipe("msf-small"), epochs=7).to_yaml())
    assert get_recipe("~/mine.yaml").epochs == 7
