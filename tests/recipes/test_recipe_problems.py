"""Every mistake is answered with file, line, key and cure."""

import subprocess
import sys
from dataclasses import replace

import pytest

from isthmus.errors import RecipeError
from isthmus.methods.method import BaseUse
from isthmus.methods.registry import METHODS
from isthmus.recipes import load_recipe

KNOWN = ", ".join(METHODS)
TIES = ", ".join(parameter.name for parameter in METHODS["ties"].parameters)
MEASURED = [m.name for m in METHODS.values() if m.base is BaseUse.REQUIRED and not m.max_experts]
HEAD = "merge_method: ties\nbase_model: b\nmodels:\n"


def refused(folder, text):
    path = folder / "merge.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(RecipeError) as caught:
        load_recipe(path)
    return str(caught.value).replace(str(folder) + "/", "")


CASES = {
    "misspelled parameter of a model": (
        HEAD + "- model: a\n  parameters:\n    weight: 1\n    densty: 0.5\n",
        "merge.yaml:7: unknown parameter 'densty' of method 'ties'; did you mean 'density'? "
        "(models[0].parameters.densty)",
    ),
    "misspelled required parameter is not missing as well": (
        HEAD + "- model: a\n  parameters:\n    Wieght: 1\n",
        "merge.yaml:6: unknown parameter 'Wieght' of method 'ties'; did you mean 'weight'? "
        "(models[0].parameters.Wieght)",
    ),
    "unknown parameter": (
        HEAD + "- model: a\nparameters:\n  weight: 1\n  qqq: 1\n",
        f"merge.yaml:7: unknown parameter 'qqq' of method 'ties'; it takes {TIES} (parameters.qqq)",
    ),
    "parameter of another method": (
        HEAD + "- model: a\nparameters:\n  weight: 1\n  t: 1\n",
        f"merge.yaml:7: 't' belongs to slerp; ties takes {TIES} (parameters.t)",
    ),
    "global parameter under a model": (
        HEAD + "- model: a\n  parameters:\n    weight: 1\n    normalize: true\n",
        "merge.yaml:7: 'normalize' of ties is one value for all models and cannot stand under "
        "one of them (models[0].parameters.normalize)\n"
        "  Move it to `parameters:` at the top level, beside merge_method.",
    ),
    "required global parameter under a model": (
        "merge_method: slerp\nbase_model: b\nmodels:\n- model: a\n  parameters: {t: 0.5}\n",
        "merge.yaml:5: 't' of slerp is one value for all models and cannot stand under one of "
        "them (models[0].parameters.t)\n"
        "  Move it to `parameters:` at the top level, beside merge_method.",
    ),
    "misspelled key": (
        HEAD + "- model: a\n  parameters: {weight: 1}\nparamaters:\n  normalize: true\n",
        "merge.yaml:6: unknown key 'paramaters'; did you mean 'parameters'? (paramaters)",
    ),
    "misspelled key of a model": (
        HEAD + "- model: a\n  paramters: {weight: 1}\nparameters: {weight: 1}\n",
        "merge.yaml:5: unknown key 'paramters' of a model; did you mean 'parameters'? "
        "(models[0].paramters)",
    ),
    "unknown key": (
        HEAD + "- model: a\nparameters: {weight: 1}\nqqq: 1\n",
        "merge.yaml:6: unknown key 'qqq'; known are merge_method, models, base_model, "
        "parameters, dtype, out_dtype, seed, tensors, space, rank, output, calibration, align, "
        "finish, name (qqq)",
    ),
    "top-level key under a model": (
        HEAD + "- model: a\n  dtype: float16\nparameters: {weight: 1}\n",
        "merge.yaml:5: unknown key 'dtype' of a model; it belongs at the top level "
        "(models[0].dtype)",
    ),
    "parameter beside the model": (
        HEAD + "- model: a\n  weight: 1\n",
        "merge.yaml:5: unknown key 'weight' of a model; it is a parameter, so write it below "
        "`parameters:` of the model (models[0].weight)",
    ),
    "parameter at the top": (
        HEAD + "- model: a\nweight: 1\n",
        "merge.yaml:5: unknown key 'weight'; it is a parameter, so write it below "
        "`parameters:` (weight)",
    ),
    "layer range": (
        HEAD + "- model: a\n  layer_range: [0, 32]\nparameters: {weight: 1}\n",
        "merge.yaml:5: unknown key 'layer_range' of a model; it belongs to slices, which this "
        "version does not have yet (models[0].layer_range)",
    ),
    "no method": (
        "models:\n- model: a\n",
        "merge.yaml: merge_method is missing (merge_method)\n  Add `merge_method: ...`. "
        f"Known methods: {KNOWN}.",
    ),
    "misspelled method": (
        "merge_method: dare-ties\nbase_model: b\nmodels:\n- model: a\n",
        "merge.yaml:1: there is no merge method 'dare-ties'; did you mean 'dare_ties'? "
        f"(merge_method)\n  Known methods: {KNOWN}.",
    ),
    "method of mergekit": (
        "base_model: b\nmerge_method: della_linear\nmodels:\n- model: a\n",
        "merge.yaml:2: merge method 'della_linear' is not in this version yet (merge_method)\n"
        f"  Known methods: {KNOWN}.",
    ),
    "no models": (
        "merge_method: ties\nbase_model: b\n",
        "merge.yaml: models is missing (models)\n  Add:\n    models:\n      - model: PATH",
    ),
    "models are no list": (
        "merge_method: linear\nmodels: {a: 1}\n",
        "merge.yaml:2: models must be a list of one model or more (models)\n"
        "  Add:\n    models:\n      - model: PATH",
    ),
    "empty models": (
        "merge_method: linear\nmodels: []\n",
        "merge.yaml:2: models must be a list of one model or more (models)\n"
        "  Add:\n    models:\n      - model: PATH",
    ),
    "model without a name": (
        "merge_method: linear\nmodels:\n- [./a]\nparameters: {weight: 1}\n",
        "merge.yaml:3: an entry of models must be text or a mapping (models[0])\n"
        "  Write `- model: PATH`.",
    ),
    "blank model": (
        "merge_method: linear\nmodels:\n- ' '\nparameters: {weight: 1}\n",
        "merge.yaml:3: model must be text, not ' ' (models[0].model)",
    ),
    "misspelled merge_method is not missing as well": (
        "merge_metod: linear\nmodels: [a]\n",
        "merge.yaml:1: unknown key 'merge_metod'; did you mean 'merge_method'? (merge_metod)",
    ),
    "misspelled models are not missing as well": (
        "merge_method: linear\nmodles: [a]\n",
        "merge.yaml:2: unknown key 'modles'; did you mean 'models'? (modles)",
    ),
    "misspelled base_model is not missing as well": (
        "merge_method: slerp\nbase_modle: b\nmodels: [a]\n",
        "merge.yaml:2: unknown key 'base_modle'; did you mean 'base_model'? (base_modle)",
    ),
    "misspelled model is not missing as well": (
        HEAD + "- modle: a\n",
        "merge.yaml:4: unknown key 'modle' of a model; did you mean 'model'? (models[0].modle)",
    ),
    "methods in a list": (
        "merge_method: [linear]\nmodels: [a]\n",
        "merge.yaml:1: merge_method must be the name of one method, not ['linear'] "
        f"(merge_method)\n  Known methods: {KNOWN}.",
    ),
    "endless number": (
        "merge_method: linear\nmodels: [a]\nseed: 0x" + "f" * 5000 + "\n",
        "merge.yaml:3: this whole number is too long for a recipe",
    ),
    "two models and no base": (
        "merge_method: slerp\nmodels: [a, c]\nparameters: {t: 1}\n",
        "merge.yaml:1: slerp needs base_model (merge_method)\n"
        "  Name one of the two models as base_model: `base_model: a`.",
    ),
    "bool as text": (
        HEAD + "- model: a\nparameters:\n  weight: 1\n  normalize: 'true'\n",
        "merge.yaml:7: normalize must be true or false, not 'true' (parameters.normalize)\n"
        "  Write true or false, without quotes.",
    ),
    "entry without model": (
        HEAD + "- parameters: {weight: 1}\n",
        "merge.yaml:4: this entry of models names no model (models[0])\n  Add `model: PATH`.",
    ),
    "number as model": (
        HEAD + "- model: 2024\nparameters: {weight: 1}\n",
        "merge.yaml:4: model must be text, not the number 2024; put it in quotes (models[0].model)",
    ),
    "empty model": (
        HEAD + "- model: ' '\nparameters: {weight: 1}\n",
        "merge.yaml:4: model must be text, not ' ' (models[0].model)",
    ),
    "model in a list": (
        HEAD + "- model: [a]\nparameters: {weight: 1}\n",
        "merge.yaml:4: model must be text, not ['a'] (models[0].model)",
    ),
    "number as revision": (
        HEAD + "- model: {path: a, revision: 12345}\nparameters: {weight: 1}\n",
        "merge.yaml:4: revision must be text, not the number 12345; put it in quotes "
        "(models[0].model.revision)",
    ),
    "misspelled key of a reference": (
        HEAD + "- model: {path: a, revison: x}\nparameters: {weight: 1}\n",
        "merge.yaml:4: unknown key 'revison' of a model; did you mean 'revision'? "
        "(models[0].model.revison)",
    ),
    "unknown key of a reference": (
        HEAD + "- model: {model: a, zzz: x}\nparameters: {weight: 1}\n",
        "merge.yaml:4: unknown key 'zzz' of a model; a model has model and lora "
        "(models[0].model.zzz)",
    ),
    "architecture": (
        HEAD + "- model: {model: a, override_architecture: X}\nparameters: {weight: 1}\n",
        "merge.yaml:4: override_architecture is not needed: tensors are matched by name, "
        "whatever the architecture (models[0].model.override_architecture)\n  Remove it.",
    ),
    "base is a number": (
        "merge_method: ties\nbase_model: 7\nmodels:\n- model: a\n",
        "merge.yaml:2: base_model must be text, not the number 7; put it in quotes (base_model)",
    ),
    "no base": (
        "# a comment\nmerge_method: ties\nmodels:\n- model: a\n  parameters: {weight: 1}\n",
        "merge.yaml:2: ties needs base_model (merge_method)\n  Add:\n    base_model: PATH",
    ),
    "required parameter of every model": (
        HEAD + "- model: b\n- model: a\n  parameters: {weight: 1}\n- model: c\n- model: d\n",
        "merge.yaml:7: ties needs 'weight' for every model; it is missing for c, d "
        "(models[2].parameters.weight)\n  Add:\n    parameters:\n      weight: 0.5\n"
        "  below each of them, or at the top level once for all.",
    ),
    "required parameter of many models": (
        HEAD + "".join(f"- model: m{i}\n" for i in range(6)),
        "merge.yaml:4: ties needs 'weight' for every model; it is missing for m0, m1, m2, m3 "
        "and 2 more (models[0].parameters.weight)\n  Add:\n    parameters:\n      weight: 0.5\n"
        "  below each of them, or at the top level once for all.",
    ),
    "required global parameter": (
        "merge_method: slerp\nbase_model: b\nmodels:\n- model: a\n",
        "merge.yaml: slerp needs the parameter 't' (parameters.t)\n"
        "  Add:\n    parameters:\n      t: 0.5",
    ),
    "too many models": (
        "merge_method: slerp\nbase_model: b\nmodels:\n- model: a\n- model: c\nparameters: {t: 1}\n",
        "merge.yaml:3: slerp takes base_model and exactly one other model, but 2 are listed: "
        "a, c (models)\n  Remove the others, or take a method for many models: "
        f"{', '.join(MEASURED)}.",
    ),
    "base alone": (
        HEAD + "- model: b\n",
        "merge.yaml:3: ties takes base_model and at least one other model, but none is listed "
        "(models)\n  Add:\n    models:\n      - model: PATH",
    ),
    "too many models to pass through": (
        "merge_method: passthrough\nmodels:\n- model: a\n- model: b\n",
        "merge.yaml:2: passthrough takes exactly one model, but 2 are listed: a, b (models)\n"
        "  Remove the others, or take a method for many models: linear.",
    ),
    "value out of range in the third filter": (
        HEAD + "- model: a\n  parameters:\n    weight: 1\n    density:\n"
        "    - {filter: mlp, value: 0.5}\n    - {filter: attn, value: 1}\n"
        "    - filter: norm\n      value:\n      - 0.1\n      - 1.5\n",
        "merge.yaml:13: density must be in (0, 1], not 1.5 "
        "(models[0].parameters.density[2].value[1])",
    ),
    "value of the wrong type": (
        HEAD + "- model: a\nparameters:\n  weight: heavy\n",
        "merge.yaml:6: weight must be a finite number, not 'heavy' (parameters.weight)",
    ),
    "value not finite": (
        HEAD + "- model: a\nparameters:\n  weight: .nan\n",
        "merge.yaml:6: weight must be a finite number, not nan (parameters.weight)",
    ),
    "value too large": (
        HEAD + "- model: a\nparameters:\n  weight: 1" + "0" * 400 + "\n",
        "merge.yaml:6: weight is too large a number (parameters.weight)",
    ),
    "bool of another type": (
        HEAD + "- model: a\nparameters:\n  weight: 1\n  normalize: 2\n",
        "merge.yaml:7: normalize must be true or false, not 2 (parameters.normalize)",
    ),
    "choice": (
        HEAD + "- model: a\nparameters:\n  weight: 1\n  rescale_norm: l2\n",
        "merge.yaml:7: rescale_norm must be one of l1, density, not 'l2' (parameters.rescale_norm)",
    ),
    "no value": (
        HEAD + "- model: a\nparameters:\n  weight:\n",
        "merge.yaml:6: weight has no value (parameters.weight)",
    ),
    "list in a gradient": (
        HEAD + "- model: a\nparameters:\n  weight: [1, [2]]\n",
        "merge.yaml:6: weight must be a finite number, not [2] (parameters.weight[1])",
    ),
    "empty gradient": (
        HEAD + "- model: a\nparameters:\n  weight: []\n",
        "merge.yaml:6: weight is an empty list (parameters.weight)\n  Give it at least one value.",
    ),
    "empty gradient in a filter": (
        HEAD + "- model: a\nparameters:\n  weight: {filter: mlp, value: []}\n",
        "merge.yaml:6: weight is an empty list (parameters.weight.value)\n"
        "  Give it at least one value.",
    ),
    "filter without value": (
        HEAD + "- model: a\nparameters:\n  weight:\n  - filter: mlp\n  - value: 1\n",
        "merge.yaml:7: this filter of weight has no value (parameters.weight[0])\n"
        "  Add a line `value:`.",
    ),
    "misspelled filter": (
        HEAD + "- model: a\nparameters:\n  weight:\n  - fitler: mlp\n    value: 1\n",
        "merge.yaml:7: unknown key 'fitler' of a filter; did you mean 'filter'? "
        "(parameters.weight[0].fitler)",
    ),
    "unknown key of a filter": (
        HEAD + "- model: a\nparameters:\n  weight: {zzz: mlp, value: 1}\n",
        "merge.yaml:6: unknown key 'zzz' of a filter; known are filter, value "
        "(parameters.weight.zzz)",
    ),
    "filter that YAML takes for a truth value": (
        HEAD + "- model: a\nparameters:\n  weight:\n  - filter: on\n    value: 1\n",
        "merge.yaml:7: filter must be text that tensor names contain, not True; put it in quotes "
        "(parameters.weight[0].filter)",
    ),
    "plain value among filters": (
        HEAD + "- model: a\nparameters:\n  weight:\n  - {filter: mlp, value: 1}\n  - 0.5\n",
        "merge.yaml:8: weight mixes plain values with filters (parameters.weight[1])\n"
        "  Write `- value: 0.5` for the tensors that no filter names.",
    ),
    "parameters are no mapping": (
        HEAD + "- model: a\n  parameters: 0.5\nparameters: {weight: 1}\n",
        "merge.yaml:5: parameters must be a mapping (models[0].parameters)\n"
        "  Write lines `name: value`.",
    ),
    "number format": (
        HEAD + "- model: a\nparameters: {weight: 1}\ndtype: bflaot16\n",
        "merge.yaml:6: there is no number format 'bflaot16'; did you mean 'bfloat16'? (dtype)\n"
        "  Known are float64, float32, float16, bfloat16, float8_e4m3fn, float8_e5m2.",
    ),
    "seed": (
        HEAD + "- model: a\nparameters: {weight: 1}\nseed: 1.5\n",
        "merge.yaml:6: seed must be a whole number, not 1.5 (seed)",
    ),
    "tensors": (
        HEAD + "- model: a\nparameters: {weight: 1}\ntensors: all\n",
        "merge.yaml:6: tensors must be 'strict' or 'common', not 'all' (tensors)",
    ),
    "name": (
        HEAD + "- model: a\nparameters: {weight: 1}\nname: 7\n",
        "merge.yaml:6: name must be text in quotes, not 7 (name)",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_message(tmp_path, case):
    text, message = CASES[case]
    assert refused(tmp_path, text) == message


@pytest.mark.parametrize(
    ("least", "most", "wanted"),
    [
        (2, None, "at least 2 models"),
        (2, 2, "exactly 2 models"),
        (2, 3, "2 to 3 models"),
    ],
)
def test_how_many_models(monkeypatch, least, most, wanted):
    method = replace(METHODS["linear"], min_experts=least, max_experts=most)
    monkeypatch.setitem(METHODS, "linear", method)
    with pytest.raises(RecipeError, match=f"linear takes {wanted}, but one is listed: a "):
        load_recipe("merge_method: linear\nmodels: [{model: a}]\nparameters: {weight: 1}\n")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("slices", "[{sources: [{model: a, layer_range: [0, 8]}]}]"),
        ("modules", "{text: {}}"),
        ("tokenizer", "{source: union}"),
        ("tokenizer_source", "union"),
        ("chat_template", "auto"),
    ],
)
def test_what_mergekit_has_and_we_do_not_yet(tmp_path, key, value):
    message = refused(
        tmp_path, f"merge_method: passthrough\n{key}: {value}\nmodels: [{{model: a}}]"
    )
    assert message.startswith(f"merge.yaml:2: {key} is not in this version yet ({key})\n  ")
    assert "unknown" not in message


@pytest.mark.parametrize("key", ["slices", "modules"])
def test_slices_in_place_of_models(tmp_path, key):
    message = refused(tmp_path, f"merge_method: passthrough\n{key}: []\n")
    assert f"{key} is not in this version yet" in message
    assert "missing" not in message


def test_tokenizer_of_the_base_needs_a_base(tmp_path):
    text = "merge_method: passthrough\ntokenizer_source: base\nmodels: [{model: a}]\n"
    assert "tokenizer_source is not in this version yet" in refused(tmp_path, text)
    assert load_recipe("base_model: a\n" + text).donor == "a"


def test_all_problems_in_the_order_of_the_file(tmp_path):
    message = refused(
        tmp_path,
        "merge_method: ties\nbase_model: b\nmodels:\n- model: a\n"
        "  parameters: {densty: 1, weight: x}\n- model: 3\nseed: s\ndtype: int3\n",
    )
    lines = message.splitlines()
    assert lines[0] == "merge.yaml has 5 problems:"
    assert [line.split(":")[1] for line in lines[1:] if line.startswith("merge.yaml:")] == [
        "5",
        "5",
        "6",
        "7",
        "8",
    ]


def test_no_more_than_ten_problems(tmp_path):
    parameters = "".join(f"  wrong{i}: 1\n" for i in range(15))
    message = refused(tmp_path, HEAD + "- model: a\nparameters:\n  weight: 1\n" + parameters)
    assert message.startswith("merge.yaml has 15 problems, the first 10 of them:\nmerge.yaml:7:")
    assert message.count("unknown parameter") == 10


def test_python_data_has_keys_for_lines():
    with pytest.raises(RecipeError, match=r"^recipe: .*\(models\[0\]\.parameters\.densty\)$"):
        load_recipe(
            {
                "merge_method": "ties",
                "base_model": "b",
                "models": [{"model": "a", "parameters": {"densty": 1, "weight": 1}}],
            }
        )


def test_torch_is_not_imported():
    code = "import sys, isthmus.recipes; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
