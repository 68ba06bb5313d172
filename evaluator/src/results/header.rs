//! Header line above the results table: the model and the options of a run, as lm-eval 0.4.13 prints them.

use serde_json::{Map, Value as Json};

use crate::task::repr;

/// Options in lm-eval's header line.
#[derive(Clone, Debug, Default)]
pub struct ResultsHeader {
    /// `model_args`: the model and its options.
    pub model_args: Map<String, Json>,
    /// Overrides of the tasks' `generation_kwargs`.
    pub gen_kwargs: Map<String, Json>,
    /// `--limit` as given.
    pub limit: Option<String>,
    /// `--num_fewshot`, if given.
    pub num_fewshot: Option<usize>,
    /// `--batch_size` as given.
    pub batch_size: String,
}

/// Formats `hf ({'pretrained': 'gpt2'}), gen_kwargs: ({}), limit: None, num_fewshot: None, batch_size: 1`.
pub fn header_line(header: &ResultsHeader) -> String {
    let or_none = |value: Option<String>| value.unwrap_or_else(|| "None".into());
    format!(
        "hf ({}), gen_kwargs: ({}), limit: {}, num_fewshot: {}, batch_size: {}",
        repr(&Json::Object(header.model_args.clone())),
        repr(&Json::Object(header.gen_kwargs.clone())),
        or_none(header.limit.clone()),
        or_none(header.num_fewshot.map(|n| n.to_string())),
        header.batch_size
    )
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use serde_json::json;

    use super::*;

    // lm-eval 0.4.13's `cli_evaluate` prints these lines.
    #[test]
    fn a_header_is_lm_evals() {
        let object = |value: Json| value.as_object().cloned().unwrap();
        let all = ResultsHeader {
            model_args: object(json!({"pretrained": "it's", "dtype": "float32", "max_length": 64})),
            gen_kwargs: object(json!({"temperature": 0.5, "do_sample": true})),
            limit: Some("20.0".into()),
            num_fewshot: Some(5),
            batch_size: "8".into(),
        };
        assert_eq!(
            header_line(&all),
            "hf ({'pretrained': \"it's\", 'dtype': 'float32', 'max_length': 64}), gen_kwargs: ({'temperature': 0.5, \
             'do_sample': True}), limit: 20.0, num_fewshot: 5, batch_size: 8"
        );
        let none = ResultsHeader { batch_size: "1".into(), ..ResultsHeader::default() };
        assert_eq!(header_line(&none), "hf ({}), gen_kwargs: ({}), limit: None, num_fewshot: None, batch_size: 1");
    }
}
