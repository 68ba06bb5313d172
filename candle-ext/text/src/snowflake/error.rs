//! Errors of Snowflake queries. Each completes "failed to ...".

/// Error of a Snowflake query.
#[derive(Debug, thiserror::Error)]
pub enum SnowflakeError {
    /// The environment lacks a variable.
    #[error("connect to Snowflake: {problem}; set {variable}")]
    NotConfigured {
        /// The problem.
        problem: String,
        /// Name of the variable.
        variable: &'static str,
    },
    /// No response, or one that reports a busy server.
    #[error("reach Snowflake at {url}: {reason}")]
    Unreachable {
        /// URL of the server.
        url: String,
        /// The last reason.
        reason: String,
    },
    /// The server does not accept the token.
    #[error(
        "log in to Snowflake at {url}: {reason}; SNOWFLAKE_TOKEN must be a valid OAuth token, or a programmatic access token \
         with SNOWFLAKE_AUTHENTICATOR=programmatic_access_token"
    )]
    AccessDenied {
        /// URL of the server.
        url: String,
        /// The server's message.
        reason: String,
    },
    /// The statement fails.
    #[error("run the Snowflake query `{statement}`: {reason}")]
    Statement {
        /// Beginning of the statement.
        statement: String,
        /// The server's message.
        reason: String,
    },
    /// The response does not have the documented form.
    #[error("read Snowflake's response: {0}")]
    InvalidResponse(String),
    /// The result has no column with a mapped name.
    #[error("rename column {column:?}: the result has the columns {columns}{hint}; correct `column_mapping`")]
    NoColumn {
        /// The column.
        column: String,
        /// Columns of the result.
        columns: String,
        /// Suggestion, or empty.
        hint: String,
    },
    /// The rows cannot be written.
    #[error("write the rows of a Snowflake query: {0}; set `data.cache_dir` to a writable folder with free space")]
    Io(#[from] std::io::Error),
}
