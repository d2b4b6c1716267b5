"""A metric's key is read back from its name, and each number has one better direction."""

import pytest

from xscale.metric_keys import MetricKey, better_direction


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("lr", MetricKey("lr")),
        ("loss/tlm", MetricKey("loss", "tlm")),
        ("loss/alignlm.bi", MetricKey("loss", "alignlm", "bi")),
        ("count/tlm/de-en", MetricKey("count", "tlm", language="de-en")),
        ("loss/alignlm.bi/de-en", MetricKey("loss", "alignlm", "bi", "de-en")),
    ],
)
def test_a_key_is_its_name(text: str, key: MetricKey) -> None:
    assert MetricKey.parse(text) == key and str(key) == text


@pytest.mark.parametrize(
    ("name", "better"),
    [
        *(("loss/tlm", -1), ("perplexity", -1), ("AER layer 8", -1), ("aer", -1), ("Delta", -1), ("accuracy", 1)),
        *(("withheld", 1), ("ater", 1), ("loss_scale", 0), ("count/tlm", 0), ("bilingual_coverage", 0)),
    ],
)
def test_one_direction_is_better(name: str, better: int) -> None:
    assert better_direction(name) == better
