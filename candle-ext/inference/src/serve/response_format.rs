//! The field `response_format`: JSON, or JSON of a schema.

use serde_json::{Value as Json, json};

use super::api_error::ApiError;
use super::fields::{Fields, shown};
use super::json_schema::constraining;
use super::reply_grammar::ReplyPart;

/// Name of the field.
pub(super) const RESPONSE_FORMAT: &str = "response_format";

/// Takes the format of the reply; `None` for any text.
pub(super) fn response_format(fields: &mut Fields) -> Result<Option<ReplyPart>, ApiError> {
    let Some(mut format) = fields.object(RESPONSE_FORMAT)? else { return Ok(None) };
    let refused = |problem: String| Err(ApiError::field(RESPONSE_FORMAT, problem));
    match format.get("type").cloned().unwrap_or_default() {
        Json::String(kind) if kind == "text" => Ok(None),
        Json::String(kind) if kind == "json_object" => Ok(Some(ReplyPart::Json(json!({"type": "object"})))),
        Json::String(kind) if kind == "json_schema" => {
            let mut named = Fields::nested(match format.remove("json_schema") {
                Some(Json::Object(fields)) => fields,
                _ => return refused("response_format has no object json_schema".to_owned()),
            });
            let Some(schema) = named.take("schema") else {
                return refused("response_format has no json_schema.schema".to_owned());
            };
            match constraining(schema) {
                Ok(schema) => Ok(Some(ReplyPart::Json(schema))),
                Err(problem) => refused(format!("json_schema.schema: {problem}")),
            }
        }
        kind => refused(format!(
            "response_format has the type {}, expected \"text\", \"json_object\" or \"json_schema\"",
            shown(&kind)
        )),
    }
}
