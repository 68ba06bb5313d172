//! Complete JSON object of a call.

use candlewick_text::long_integer;
use candlewick_text::template::ToolCallKeys;
use serde_json::{Map, Value as Json};

/// Keys of the arguments. Models of a family differ in them.
pub(super) const ARGUMENTS_KEYS: [&str; 2] = ["arguments", "parameters"];

/// Returns the name and the arguments of a call's object, whose arguments are an object or the JSON text of one.
pub(super) fn whole_object(object: &str, keys: &ToolCallKeys) -> Option<(String, String)> {
    let Json::Object(mut fields) = long_integer::parse(object).ok()? else { return None };
    let name = fields.get(&keys.name)?.as_str()?.to_owned();
    let arguments = [keys.arguments.as_str()].into_iter().chain(ARGUMENTS_KEYS).find_map(|key| fields.remove(key));
    match arguments {
        Some(Json::Object(arguments)) => {
            let text = Json::Object(arguments).to_string();
            Some((name, long_integer::to_text(&text).into_owned()))
        }
        Some(Json::String(text)) => serde_json::from_str::<Map<String, Json>>(&text).ok().map(|_| (name, text)),
        _ => None,
    }
}
