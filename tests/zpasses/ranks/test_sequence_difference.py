"""The text of an AgreementError says what differs, whatever the size of the collectives."""

from zpasses.ranks.sequence_difference import first_difference

OP = "all_gather_into_tensor_coalesced"


def tensor(name, line=7):
    return f"float32[4, 2] of {name} (module {name[:-7]}) at train.py:{line}: return self.w(x)"


def ballot(*collectives, reduce_op=""):
    lines = [
        f"{OP}({', '.join(['float32[4, 2]'] * len(names))}{reduce_op}) of {', '.join(names)}"
        for names in collectives
    ]
    tensors = [[tensor(name, at) for at, name in enumerate(names)] for names in collectives]
    return {
        "graph": "0/0 forward",
        "dump": None,
        "lines": lines,
        "places": [f"arbitrary.py:{len(names)}" for names in collectives],
        "modules": ["" for _ in collectives],
        "tensors": tensors,
    }


def bucket(count):
    return [f"layers.{at}.weight" for at in range(count)]


def said(one, other):
    return first_difference(0, one, 1, other)


def test_a_bucket_with_a_tensor_more_names_that_tensor_and_its_line():
    names = bucket(40)
    more = [*names[:17], "extra.weight", *names[17:]]
    text = said(ballot(names), ballot(more))
    assert f"is {OP} of 40 tensors on rank 0" in text
    assert f"but {OP} of 41 tensors on rank 1" in text
    assert (
        "Only on rank 1: float32[4, 2] of extra.weight (module extra) at train.py:17: "
        "return self.w(x). " in text
    )
    assert "Only on rank 0" not in text
    assert "layers." not in text
    assert "arbitrary.py" not in text


def test_a_list_of_differences_is_capped():
    text = said(ballot(bucket(5)), ballot(bucket(200)))
    assert "layers.5.weight" in text
    assert "layers.7.weight" in text
    assert "layers.8.weight" not in text
    assert "; and 192 more. " in text
    assert len(text) < 1000


def test_what_later_collectives_lack_is_said_too():
    text = said(ballot(["a.weight"], ["b.weight"]), ballot(["b.weight"]))
    assert "Only on rank 0: float32[4, 2] of a.weight" in text
    assert "Only on rank 1" not in text


def test_a_shorter_sequence_is_said():
    assert "nothing more on rank 1" in said(
        ballot(["a.weight"], ["b.weight"]), ballot(["a.weight"])
    )


def test_equal_tensors_with_another_reduction_are_told_apart():
    text = said(ballot(bucket(9), reduce_op=", avg"), ballot(bucket(9), reduce_op=", sum"))
    assert f"is {OP} of 9 tensors, avg on rank 0" in text
    assert f"but {OP} of 9 tensors, sum on rank 1" in text
    assert "layers." not in text


def test_the_only_tensor_that_differs_is_named_once():
    text = said(ballot(["a.weight", "b.weight"]), ballot(["a.weight", "c.weight"]))
    assert "of 2 tensors, of which tensor 2 is float32[4, 2] of b.weight" in text
    assert text.count("b.weight") == text.count("c.weight") == 1
