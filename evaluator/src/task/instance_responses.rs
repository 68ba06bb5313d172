//! Responses of the model, grouped by instance.

use std::collections::BTreeMap;

use candlewick_inference::request::Response;

use super::instance::Instance;
use super::response_value::ResponseValue;

/// Instance with its responses, one for each of the task's `repeats`.
pub(crate) struct InstanceResponses<'a> {
    pub(crate) instance: &'a Instance,
    pub(crate) answers: Vec<ResponseValue>,
}

impl<'a> InstanceResponses<'a> {
    /// Groups instances by document, each with its responses.
    pub(super) fn group(instances: &'a [Instance], responses: &[Response]) -> BTreeMap<usize, Vec<Self>> {
        let mut docs: BTreeMap<usize, Vec<Self>> = BTreeMap::new();
        for (instance, response) in instances.iter().zip(responses) {
            let requests = docs.entry(instance.doc_id).or_default();
            match requests.iter_mut().find(|asked| asked.instance.idx == instance.idx) {
                Some(asked) => asked.answers.push(response.into()),
                None => requests.push(Self { instance, answers: vec![response.into()] }),
            }
        }
        for requests in docs.values_mut() {
            requests.sort_by_key(|asked| asked.instance.idx);
        }
        docs
    }
}
