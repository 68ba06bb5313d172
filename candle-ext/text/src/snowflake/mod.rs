//! Query results of Snowflake, over its SQL REST API, as a JSON Lines file.
//!
//! Documentation: <https://docs.snowflake.com/en/developer-guide/sql-api/reference>. The token is an OAuth token or a
//! programmatic access token; key-pair authentication is not supported.

mod client;
mod error;
mod settings;
mod values;

use std::io::{BufWriter, Write};
use std::path::Path;

use serde_json::{Map, Value};

use crate::suggestion::nearest;
use client::{SnowflakeClient, StatementResult};
pub use error::SnowflakeError;
pub use settings::{SnowflakeSettings, TokenType};
use values::to_json;

/// A query and the rows and columns of its result that are used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SnowflakeQuery {
    /// One SQL statement.
    pub statement: String,
    /// Largest number of rows; `None` uses all.
    pub limit: Option<usize>,
    /// Pairs of a column's name in the result and its new name. Other columns keep their names.
    pub column_mapping: Vec<(String, String)>,
}

/// Runs a query and writes its rows to `path`, a JSON object a line. Returns their number.
///
/// The file appears complete or not at all, and only its owner can read it. Memory holds one partition of the result.
///
/// # Errors
/// If the server cannot be reached, the query fails, a mapped column is missing, a partition has other rows than
/// announced, or the file cannot be written.
pub fn write_rows(query: &SnowflakeQuery, settings: &SnowflakeSettings, path: &Path) -> Result<usize, SnowflakeError> {
    let client = SnowflakeClient::new(settings)?;
    let result = client.run(&query.statement)?;
    let names = renamed(&result, &query.column_mapping)?;
    let file = tempfile::NamedTempFile::new_in(path.parent().unwrap_or(Path::new(".")))?;
    let mut writer = BufWriter::new(file);
    let most = query.limit.unwrap_or(usize::MAX);
    let mut n_rows = 0;
    for (partition_idx, announced) in result.partitions.iter().enumerate() {
        if n_rows >= most {
            break;
        }
        let rows = match partition_idx {
            0 => result.first_rows.clone(),
            _ => client.partition(&result.handle, partition_idx)?,
        };
        check_rows(&format!("partition {partition_idx}"), rows.len(), announced.row_count)?;
        for row in rows.into_iter().take(most - n_rows) {
            writeln!(writer, "{}", object(&result, &names, row)?)?;
            n_rows += 1;
        }
    }
    if n_rows < most {
        check_rows("the result", n_rows, result.n_rows)?;
    }
    let file = writer.into_inner().map_err(std::io::IntoInnerError::into_error)?;
    file.as_file().sync_all()?;
    file.persist(path).map_err(|error| error.error)?;
    Ok(n_rows)
}

/// Compares a number of rows with the announced one.
fn check_rows(part: &str, n_rows: usize, announced: Option<usize>) -> Result<(), SnowflakeError> {
    match announced {
        Some(announced) if announced != n_rows => {
            let problem = format!("{part} has {n_rows} rows, but {announced} are announced; start again");
            Err(SnowflakeError::InvalidResponse(problem))
        }
        _ => Ok(()),
    }
}

/// Returns the names of the columns after renaming.
fn renamed(result: &StatementResult, mapping: &[(String, String)]) -> Result<Vec<String>, SnowflakeError> {
    let own: Vec<&str> = result.columns.iter().map(|column| column.name.as_str()).collect();
    if let Some((column, _)) = mapping.iter().find(|(from, _)| !own.contains(&from.as_str())) {
        let near = nearest(column, own.iter().copied());
        let hint = near.map_or_else(String::new, |near| format!("; did you mean {near:?}?"));
        return Err(SnowflakeError::NoColumn { column: column.clone(), columns: own.join(", "), hint });
    }
    let new_name = |name: &str| mapping.iter().find(|(from, _)| from == name).map_or(name, |(_, to)| to).to_owned();
    Ok(own.into_iter().map(new_name).collect())
}

fn object(result: &StatementResult, names: &[String], row: Vec<Value>) -> Result<Value, SnowflakeError> {
    if row.len() != names.len() {
        let problem = format!("a row has {} values, but there are {} columns", row.len(), names.len());
        return Err(SnowflakeError::InvalidResponse(problem));
    }
    let values = result.columns.iter().zip(row).map(|(column, value)| to_json(column, value));
    Ok(Value::Object(names.iter().cloned().zip(values).collect::<Map<_, _>>()))
}
