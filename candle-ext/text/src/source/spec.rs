//! Data set specifications: `name`, `name:split`, `name:split[10:20]`, `name:a[:5%]+b`.

use std::ops::Range;

use super::SourceError;

/// Data set specification: name, splits and row ranges.
#[derive(Debug, Clone, PartialEq)]
pub struct DatasetSpec {
    /// Local path or Hub id.
    pub name: String,
    /// Splits to concatenate. Empty if none is given.
    pub parts: Vec<SplitSlice>,
}

/// One split, or a range of its rows.
#[derive(Debug, Clone, PartialEq)]
pub struct SplitSlice {
    /// Name of the split.
    pub split: String,
    /// Rows of the split.
    pub slice: RowRange,
}

/// Half-open range of rows, as row numbers or percentages. A missing bound means the start or the end.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct RowRange {
    /// First row.
    pub from: Option<RangeBound>,
    /// Row after the last.
    pub to: Option<RangeBound>,
}

/// Bound of a [`RowRange`]. Negative values count from the end.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum RangeBound {
    /// Row number.
    Row(i64),
    /// Percentage of all rows, rounded to the nearest row.
    Percent(f64),
}

impl DatasetSpec {
    /// Parses a data set specification. A path for which `exists` is true is taken whole, even with a colon in it.
    pub fn parse(text: &str, exists: impl Fn(&str) -> bool) -> Result<Self, SourceError> {
        let text = text.trim();
        let wrong = |problem: String| SourceError::InvalidSpec { spec: text.to_owned(), problem };
        if text.is_empty() {
            return Err(wrong("write a path or a Hub id, such as data/train.jsonl".into()));
        }
        if let Some(rest) = text.split_once("://").map(|(_, rest)| rest) {
            let id = rest.trim_start_matches("huggingface.co/").trim_start_matches("datasets/");
            return Err(wrong(format!("it is an address; write the Hub id alone: {id}")));
        }
        match text.split_once(':') {
            Some((name, split)) if !exists(text) => {
                if name.trim().is_empty() {
                    return Err(wrong("there is no name before the colon".into()));
                }
                Ok(Self { name: name.trim().to_owned(), parts: SplitSlice::parse_plus_joined(split)? })
            }
            _ => Ok(Self { name: text.to_owned(), parts: Vec::new() }),
        }
    }
}

impl SplitSlice {
    /// Parses `train`, `train[:10]` or several such slices joined by `+`.
    pub fn parse_plus_joined(text: &str) -> Result<Vec<Self>, SourceError> {
        text.split('+').map(|part| Self::parse(part.trim())).collect()
    }

    fn parse(text: &str) -> Result<Self, SourceError> {
        let wrong = |problem: &str| SourceError::InvalidSpec { spec: text.to_owned(), problem: problem.into() };
        let (split, slice) = match text.split_once('[') {
            None => (text, RowRange::default()),
            Some((split, rest)) => {
                let inside = rest.strip_suffix(']').ok_or_else(|| wrong("a bracket stays open"))?;
                (split, RowRange::parse(inside).map_err(|problem| wrong(&problem))?)
            }
        };
        match split.trim() {
            "" => Err(wrong("there is no split name; write it as train[10:20]")),
            split => Ok(Self { split: split.to_owned(), slice }),
        }
    }
}

impl RowRange {
    /// Converts the range to row indices of a split with `n_rows` rows. Fails if rows are missing or the range is
    /// empty.
    pub fn resolve(&self, n_rows: usize) -> Result<Range<usize>, String> {
        let from = self.from.map_or(0, |bound| bound.resolve(n_rows));
        let to = self.to.map_or(n_rows as i64, |bound| bound.resolve(n_rows));
        if from > n_rows as i64 || to > n_rows as i64 {
            return Err(format!("rows {from} to {to} were requested, but there are only {n_rows}"));
        }
        if from >= to {
            return Err(format!("rows {from} to {to} of {n_rows} are none"));
        }
        Ok(from as usize..to as usize)
    }

    fn parse(inside: &str) -> Result<Self, String> {
        let (from, to) = inside
            .split_once(':')
            .ok_or_else(|| format!("[{inside}] is not a range; write [10:20], [:5%] or [-100:]"))?;
        Ok(Self { from: RangeBound::parse(from)?, to: RangeBound::parse(to)? })
    }
}

impl RangeBound {
    fn parse(text: &str) -> Result<Option<Self>, String> {
        let text = text.trim().replace('_', "");
        if text.is_empty() {
            return Ok(None);
        }
        let bound = match text.strip_suffix('%') {
            Some(percent) => percent
                .trim()
                .parse()
                .ok()
                .filter(|p: &f64| p.abs() <= 100.0)
                .map(Self::Percent)
                .ok_or_else(|| format!("{text:?} is not a percentage between -100 and 100"))?,
            None => text.parse().map(Self::Row).map_err(|_| format!("{text:?} is not a row number or a percentage"))?,
        };
        Ok(Some(bound))
    }

    fn resolve(self, n_rows: usize) -> i64 {
        let n_rows = n_rows as i64;
        let row = match self {
            Self::Row(row) => row,
            Self::Percent(percent) => (percent / 100.0 * n_rows as f64).round_ties_even() as i64,
        };
        if row < 0 { (n_rows + row).max(0) } else { row }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn rows(slice: &str, n_rows: usize) -> Result<Range<usize>, String> {
        let parts = SplitSlice::parse_plus_joined(slice).map_err(|e| e.to_string())?;
        parts[0].slice.resolve(n_rows)
    }

    #[test]
    fn a_name_with_or_without_a_split() {
        let spec = DatasetSpec::parse("HuggingFaceH4/ultrachat_200k", |_| false).unwrap();
        assert_eq!((spec.name.as_str(), spec.parts.len()), ("HuggingFaceH4/ultrachat_200k", 0));
        let spec = DatasetSpec::parse("a/b:train[10:20]+test[:5%]", |_| false).unwrap();
        assert_eq!(spec.name, "a/b");
        assert_eq!(spec.parts[0].split, "train");
        assert_eq!(spec.parts[1].slice.to, Some(RangeBound::Percent(5.0)));
    }

    #[test]
    fn a_path_that_exists_keeps_its_colon() {
        let spec = DatasetSpec::parse("odd:name.jsonl", |path| path == "odd:name.jsonl").unwrap();
        assert_eq!((spec.name.as_str(), spec.parts.len()), ("odd:name.jsonl", 0));
    }

    #[test]
    fn slices_count_as_datasets_does() {
        assert_eq!(rows("train[10:20]", 100), Ok(10..20));
        assert_eq!(rows("train[:5%]", 1000), Ok(0..50));
        assert_eq!(rows("train[-10:]", 100), Ok(90..100));
        assert_eq!(rows("train[50%:]", 3), Ok(2..3));
        assert_eq!(rows("train", 7), Ok(0..7));
    }

    #[test]
    fn impossible_slices_say_how_many_rows_there_are() {
        assert!(rows("train[:20]", 10).unwrap_err().contains("there are only 10"));
        assert!(rows("train[5:5]", 10).unwrap_err().contains("are none"));
        assert!(rows("train[5]", 10).unwrap_err().contains("[10:20]"));
        assert!(rows("train[:101%]", 10).unwrap_err().contains("percentage"));
        assert!(rows("train[1:2", 10).unwrap_err().contains("bracket"));
        assert!(rows("[1:2]", 10).unwrap_err().contains("no split name"));
    }

    #[test]
    fn an_address_is_answered_with_the_id() {
        let error = DatasetSpec::parse("https://huggingface.co/datasets/a/b", |_| false).unwrap_err();
        assert!(error.to_string().ends_with("write the Hub id alone: a/b"), "{error}");
    }

    proptest! {
        #[test]
        fn any_words_are_a_spec_or_an_error(text in ".{0,40}", n_rows in 0usize..1000) {
            if let Ok(spec) = DatasetSpec::parse(&text, |_| false) {
                for part in spec.parts {
                    if let Ok(range) = part.slice.resolve(n_rows) {
                        prop_assert!(range.start < range.end && range.end <= n_rows);
                    }
                }
            }
        }

        #[test]
        fn any_brackets_are_a_slice_or_an_error(inside in "[-0-9:%_. e]{0,14}", n_rows: usize) {
            let n_rows = n_rows >> 2;
            if let Ok(parts) = SplitSlice::parse_plus_joined(&format!("train[{inside}]"))
                && let Ok(range) = parts[0].slice.resolve(n_rows)
            {
                prop_assert!(range.start < range.end && range.end <= n_rows);
            }
        }
    }
}
