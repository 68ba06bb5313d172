//! The format of tokenized rows: `input_ids`, with optional `labels` and `attention_mask`, as transformers names them.

use serde_json::Value;

use super::Document;
use super::error::RowProblem;
use crate::source::Row;

/// Column of the token ids.
pub(crate) const INPUT_IDS: &str = "input_ids";
const LABELS: &str = "labels";
const ATTENTION_MASK: &str = "attention_mask";
/// Label of a token without loss.
const IGNORED: i64 = -100;

/// Columns of tokenized rows. Their names are fixed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TokenIds;

impl TokenIds {
    pub(crate) fn parse(self, row: &Row) -> Result<Document, RowProblem> {
        let ids =
            numbers(row, INPUT_IDS)?.ok_or_else(|| RowProblem::type_of(INPUT_IDS, None, "a list of token ids"))?;
        let labels = numbers(row, LABELS)?;
        if let Some(labels) = &labels {
            check_labels(&ids, labels)?;
        }
        if let Some(mask) = numbers(row, ATTENTION_MASK)? {
            check_mask(&ids, &mask)?;
        }
        let is_target = labels.map(|labels| labels.iter().map(|label| *label != IGNORED).collect());
        let wrong = |id: i64| RowProblem::new(format!("column `{INPUT_IDS}` has the token id {id}"), TOKENIZE_AGAIN);
        let ids = ids.into_iter().map(|id| u32::try_from(id).map_err(|_| wrong(id))).collect::<Result<_, _>>()?;
        Ok(Document::Tokens { ids, is_target })
    }
}

const TOKENIZE_AGAIN: &str = "tokenize the row again, or remove `process: false` from the source";

/// Returns the whole numbers of a list; `None` without the column.
fn numbers(row: &Row, column: &str) -> Result<Option<Vec<i64>>, RowProblem> {
    let items = match row.get(column) {
        None | Some(Value::Null) => return Ok(None),
        Some(Value::Array(items)) => items,
        other => return Err(RowProblem::type_of(column, other, "a list of whole numbers")),
    };
    let number = |(idx, item): (usize, &Value)| {
        let found = || RowProblem::type_of(column, Some(item), "a whole number").within(column, idx);
        item.as_i64().ok_or_else(found)
    };
    items.iter().enumerate().map(number).collect::<Result<_, _>>().map(Some)
}

/// Checks that each label is its own token, or ignored. The shift by one token happens later.
fn check_labels(ids: &[i64], labels: &[i64]) -> Result<(), RowProblem> {
    check_length(ids, labels, LABELS)?;
    let Some(idx) = (0..ids.len()).find(|idx| labels[*idx] != IGNORED && labels[*idx] != ids[*idx]) else {
        return Ok(());
    };
    let problem = format!("the label {} belongs to the token {}", labels[idx], ids[idx]);
    let fix = format!("a label is its token's id, or {IGNORED} for a token without loss; do not shift them");
    Err(RowProblem::new(problem, fix).within(LABELS, idx))
}

fn check_mask(ids: &[i64], mask: &[i64]) -> Result<(), RowProblem> {
    check_length(ids, mask, ATTENTION_MASK)?;
    match mask.iter().position(|flag| *flag != 1) {
        None => Ok(()),
        Some(idx) => {
            let fix = "remove the padding from the row; batches are padded later";
            Err(RowProblem::new("the token is padding", fix).within(ATTENTION_MASK, idx))
        }
    }
}

fn check_length(ids: &[i64], other: &[i64], column: &str) -> Result<(), RowProblem> {
    if ids.len() == other.len() {
        return Ok(());
    }
    let problem = format!("column `{column}` has {} items, `{INPUT_IDS}` has {}", other.len(), ids.len());
    Err(RowProblem::new(problem, TOKENIZE_AGAIN))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn parse(row: &str) -> Result<Document, String> {
        let row = serde_json::from_str(row).unwrap();
        TokenIds.parse(&row).map_err(|RowProblem { problem, fix }| format!("{problem}; {fix}"))
    }

    #[test]
    fn labels_are_a_loss_mask() {
        let tokens = |is_target| Ok(Document::Tokens { ids: vec![3, 4, 5], is_target });
        assert_eq!(parse(r#"{"input_ids": [3, 4, 5]}"#), tokens(None));
        let row = r#"{"input_ids": [3, 4, 5], "labels": [-100, 4, -100], "attention_mask": [1, 1, 1], "id": "a"}"#;
        assert_eq!(parse(row), tokens(Some(vec![false, true, false])));
    }

    #[test]
    fn rows_that_cannot_be_trained_on_are_refused() {
        for (row, want) in [
            (r#"{"labels": [1]}"#, "column `input_ids` is missing, expected a list of token ids"),
            (r#"{"input_ids": "a"}"#, "column `input_ids` is a string, expected a list of whole numbers"),
            (r#"{"input_ids": [1, 2.5]}"#, "column `input_ids`, item 1: column `input_ids` is the number 2.5"),
            (r#"{"input_ids": [-1]}"#, "column `input_ids` has the token id -1; tokenize the row again"),
            (r#"{"input_ids": [1, 2], "labels": [1]}"#, "column `labels` has 1 items, `input_ids` has 2"),
            (r#"{"input_ids": [1, 2], "labels": [2, -100]}"#, "item 0: the label 2 belongs to the token 1; a label is"),
            (r#"{"input_ids": [1, 2], "attention_mask": [1, 0]}"#, "item 1: the token is padding; remove the padding"),
        ] {
            let error = parse(row).unwrap_err();
            assert!(error.contains(want), "no {want:?} in {error}");
        }
    }
}
