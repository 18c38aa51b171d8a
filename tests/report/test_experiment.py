"""The shipped experiments have the papers' numbers, one for each column."""

from farspan.experiments import load_all


def test_the_papers_numbers_are_the_papers() -> None:
    papers = {x.name: {(r.kind, r.variant, r.scaling): r.paper for r in x.rows} for x in load_all()}
    assert {name for name in papers if "dropin" not in name and "cosformer" not in name} == {
        *("table1", "table2", "table3", "figure1", "figure4", "figure5"),
    }
    assert papers["table1"]["", "rope", "none"] == [19.66, 411.5, 3276.0, 3026.0, 3028.0, "inf", "inf"]
    assert papers["table1"]["", "coca-slack", "dynamic_ntk-4"] == [20.11, 20.81, 25.88, 34.16, 55.75, 89.31, 101.13]
    assert papers["table1"]["", "coca-exact", "none"] == []
    assert papers["table2"]["", "alibi", "none"] == [0.82, 0.65, 0.28, 0.18, 0.12, "OOM", "OOM"]
    strict = papers["table3"]["passkey", "coca-strict", "dynamic_ntk-8"]
    assert strict == [1.0, 0.93, 0.65, 0.34, 0.10, 0.04, 0.01]
    assert papers["dropin"]["", "original", "dynamic_ntk-4"] == [7.30, 14.40, 133.87, 1.0, 0.03]


def test_each_row_has_a_number_of_the_paper_for_each_column_or_none() -> None:
    for x in load_all():
        assert len(x.headings) == len(x.columns)
        values = len(x.lengths) + len(x.prompts) + len(x.columns)
        assert {len(row.paper) for row in x.rows} <= {0, values}, x.name
