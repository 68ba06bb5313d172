//! Conversion of Parquet values to JSON.

use parquet::basic::{ConvertedType, Type as PhysicalType};
use parquet::record::{Field, Row as Record};
use parquet::schema::types::Type;
use serde_json::{Map, Value};

/// Column path, such as `image.bytes`, of a value that is not UTF-8 text.
pub(super) struct NotText {
    pub(super) column: String,
}

/// Returns the path and the type of the first column that the record API cannot read.
pub(super) fn unreadable(schema: &Type) -> Option<(String, String)> {
    schema.get_fields().iter().find_map(|field| {
        if field.is_primitive() {
            return (!is_readable(field)).then(|| (field.name().to_owned(), type_name(field)));
        }
        unreadable(field).map(|(path, name)| (format!("{}.{path}", field.name()), name))
    })
}

fn is_readable(field: &Type) -> bool {
    use ConvertedType as C;
    let converted = field.get_basic_info().converted_type();
    match field.get_physical_type() {
        PhysicalType::INT32 => matches!(
            converted,
            C::NONE
                | C::INT_8
                | C::INT_16
                | C::INT_32
                | C::UINT_8
                | C::UINT_16
                | C::UINT_32
                | C::DATE
                | C::TIME_MILLIS
                | C::DECIMAL
        ),
        PhysicalType::INT64 => matches!(
            converted,
            C::NONE | C::INT_64 | C::UINT_64 | C::TIME_MICROS | C::TIMESTAMP_MILLIS | C::TIMESTAMP_MICROS | C::DECIMAL
        ),
        PhysicalType::BYTE_ARRAY => {
            matches!(converted, C::NONE | C::UTF8 | C::ENUM | C::JSON | C::BSON | C::DECIMAL)
        }
        PhysicalType::FIXED_LEN_BYTE_ARRAY => matches!(converted, C::NONE | C::DECIMAL),
        PhysicalType::BOOLEAN | PhysicalType::INT96 | PhysicalType::FLOAT | PhysicalType::DOUBLE => true,
    }
}

fn type_name(field: &Type) -> String {
    match field.get_basic_info().converted_type() {
        ConvertedType::NONE => field.get_physical_type().to_string(),
        converted => converted.to_string(),
    }
}

/// Converts a record to a JSON object.
pub(super) fn object(record: &Record) -> Result<Value, NotText> {
    let columns = record.get_column_iter();
    let pairs = columns.map(|(name, field)| Ok((name.clone(), value(field).map_err(|e| e.below(name))?)));
    Ok(Value::Object(pairs.collect::<Result<_, _>>()?))
}

fn value(field: &Field) -> Result<Value, NotText> {
    match field {
        Field::Bytes(bytes) => {
            let text = std::str::from_utf8(bytes.data()).map_err(|_| NotText { column: String::new() })?;
            Ok(text.into())
        }
        Field::Group(record) => object(record),
        Field::ListInternal(list) => list.elements().iter().map(value).collect(),
        Field::MapInternal(map) => {
            let mut pairs = Map::new();
            for (key, field) in map.entries() {
                let key = match value(key)? {
                    Value::String(text) => text,
                    other => other.to_string(),
                };
                let field = value(field).map_err(|e| e.below(&key))?;
                pairs.insert(key, field);
            }
            Ok(Value::Object(pairs))
        }
        other => Ok(other.to_json_value()),
    }
}

impl NotText {
    fn below(self, name: &str) -> Self {
        let column = if self.column.is_empty() { name.to_owned() } else { format!("{name}.{}", self.column) };
        Self { column }
    }
}
