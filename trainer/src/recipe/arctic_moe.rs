//! The key `arctic_moe`.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Value of `arctic_moe`. Experts always use the same kernels; `true` requires a model with experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum ArcticMoe {
    /// `false`: no check.
    Off,
    /// `true`: the model must have experts.
    On,
    /// `auto`: no check.
    Auto,
}

impl<'de> Deserialize<'de> for ArcticMoe {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct OneOf;
        impl serde::de::Visitor<'_> for OneOf {
            type Value = ArcticMoe;

            fn expecting(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
                f.write_str("true, false or auto")
            }
            fn visit_bool<E>(self, on: bool) -> Result<ArcticMoe, E> {
                Ok(if on { ArcticMoe::On } else { ArcticMoe::Off })
            }
            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<ArcticMoe, E> {
                match text {
                    "auto" => Ok(ArcticMoe::Auto),
                    _ => Err(E::invalid_value(serde::de::Unexpected::Str(text), &self)),
                }
            }
        }
        deserializer.deserialize_any(OneOf)
    }
}

impl JsonSchema for ArcticMoe {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "ArcticMoe".into()
    }
    fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
        schemars::json_schema!({ "enum": [true, false, "auto"] })
    }
}
