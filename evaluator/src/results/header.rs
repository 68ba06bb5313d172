//! The line above the table: the model and the options of a run, as lm-eval 0.4.13 prints them.

use serde_json::{Map, Value as Json};

use crate::task::repr;

/// The options that lm-eval names above its table.
#[derive(Clone, Debug, Default)]
pub struct ResultsHeader {
    /// The model, and what else is given for it.
    pub model_args: Map<String, Json>,
    /// Changes to the tasks' `generation_kwargs`.
    pub gen_kwargs: Map<String, Json>,
    /// The number of documents of each task, as it was given.
    pub limit: Option<String>,
    /// The number of examples, if one was given.
    pub num_fewshot: Option<usize>,
    /// The batch size, as it was given.
    pub batch_size: String,
}

/// Prints `hf ({'pretrained': 'gpt2'}), gen_kwargs: ({}), limit: None, num_fewshot: None, batch_size: 1`.
pub fn header(header: &ResultsHeader) -> String {
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

    // What lm-eval 0.4.13's `cli_evaluate` prints for the same options.
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
            header(&all),
            "hf ({'pretrained': \"it's\", 'dtype': 'float32', 'max_length': 64}), gen_kwargs: ({'temperature': 0.5, \
             'do_sample': True}), limit: 20.0, num_fewshot: 5, batch_size: 8"
        );
        let none = ResultsHeader { batch_size: "1".into(), ..ResultsHeader::default() };
        assert_eq!(header(&none), "hf ({}), gen_kwargs: ({}), limit: None, num_fewshot: None, batch_size: 1");
    }
}
