//! The connection to Snowflake, from the environment variables of its clients.

use std::time::Duration;

use crate::response_body::userinfo;

/// Longest time of a statement. Snowflake ends statements after two days by default.
const STATEMENT_TIMEOUT: Duration = Duration::from_secs(4 * 3600);

/// Settings of the connection.
#[derive(Clone, PartialEq, Eq)]
pub struct SnowflakeSettings {
    /// URL of the account: `https://ACCOUNT.snowflakecomputing.com`.
    pub url: Option<String>,
    /// Token of the user.
    pub token: Option<String>,
    /// Type of the token.
    pub token_type: Option<TokenType>,
    /// Session parameters of a statement by name: `warehouse`, `role`, `database` and `schema`.
    pub context: Vec<(&'static str, String)>,
    /// Longest time of a statement.
    pub statement_timeout: Duration,
}

/// Type of a token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TokenType {
    /// An OAuth access token.
    OAuth,
    /// A programmatic access token (PAT).
    ProgrammaticAccessToken,
}

impl TokenType {
    /// Returns the value of the header `X-Snowflake-Authorization-Token-Type`.
    pub(super) fn header(self) -> &'static str {
        match self {
            Self::OAuth => "OAUTH",
            Self::ProgrammaticAccessToken => "PROGRAMMATIC_ACCESS_TOKEN",
        }
    }
}

impl SnowflakeSettings {
    /// Reads the environment variables `SNOWFLAKE_*`, for binaries only: `ACCOUNT` or `HOST`, `TOKEN`, `AUTHENTICATOR`
    /// (`oauth`, the default, or `programmatic_access_token`), `WAREHOUSE`, `ROLE`, `DATABASE` and `SCHEMA`.
    pub fn from_env() -> Self {
        Self::from_vars(|name| std::env::var(name).ok())
    }

    /// Reads the settings from any lookup of variables, as [`SnowflakeSettings::from_env`] does.
    pub fn from_vars(var: impl Fn(&str) -> Option<String>) -> Self {
        let var = |name: &str| var(&format!("SNOWFLAKE_{name}")).map(|v| v.trim().to_owned()).filter(|v| !v.is_empty());
        let host = var("HOST").map(|host| if host.contains("://") { host } else { format!("https://{host}") });
        // An underscore is not allowed in a host name.
        let account =
            || var("ACCOUNT").map(|name| format!("https://{}.snowflakecomputing.com", name.replace('_', "-")));
        let token_type = match var("AUTHENTICATOR").map(|name| name.to_lowercase()).as_deref() {
            None | Some("oauth") => Some(TokenType::OAuth),
            Some("programmatic_access_token") => Some(TokenType::ProgrammaticAccessToken),
            Some(_) => None,
        };
        let context = ["warehouse", "role", "database", "schema"];
        let context = context.into_iter().filter_map(|name| Some((name, var(&name.to_uppercase())?)));
        Self {
            url: host.or_else(account).map(|url| url.trim_end_matches('/').to_owned()),
            token: var("TOKEN"),
            token_type,
            context: context.collect(),
            statement_timeout: STATEMENT_TIMEOUT,
        }
    }

    /// Returns the URL for messages, without user name and password.
    pub(super) fn shown_url(&self) -> String {
        let url = self.url.as_deref().unwrap_or_default();
        match userinfo(url) {
            Some(userinfo) => url.replace(&format!("{userinfo}@"), ""),
            None => url.to_owned(),
        }
    }
}

/// Shows no token and no password.
impl std::fmt::Debug for SnowflakeSettings {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { url, token_type, context, .. } = self;
        let url = url.as_ref().map(|_| self.shown_url());
        write!(f, "SnowflakeSettings({url:?}, {token_type:?}, {context:?})")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(variables: &[(&str, &str)]) -> SnowflakeSettings {
        let lookup = |name: &str| variables.iter().find(|(own, _)| *own == name).map(|(_, value)| (*value).to_owned());
        SnowflakeSettings::from_vars(lookup)
    }

    #[test]
    fn the_variables_of_snowflakes_clients_are_read() {
        let settings = of(&[
            ("SNOWFLAKE_ACCOUNT", "my_org-acc"),
            ("SNOWFLAKE_TOKEN", " t0ken "),
            ("SNOWFLAKE_WAREHOUSE", "W"),
            ("SNOWFLAKE_ROLE", ""),
        ]);
        assert_eq!(settings.url.as_deref(), Some("https://my-org-acc.snowflakecomputing.com"));
        assert_eq!((settings.token.as_deref(), settings.token_type), (Some("t0ken"), Some(TokenType::OAuth)));
        assert_eq!(settings.context, [("warehouse", "W".to_owned())]);
        assert!(!format!("{settings:?}").contains("t0ken"));
        let host = of(&[("SNOWFLAKE_HOST", "a.b"), ("SNOWFLAKE_AUTHENTICATOR", "PROGRAMMATIC_ACCESS_TOKEN")]);
        assert_eq!(host.url.as_deref(), Some("https://a.b"));
        assert_eq!(host.token_type, Some(TokenType::ProgrammaticAccessToken));
        assert_eq!(of(&[("SNOWFLAKE_AUTHENTICATOR", "externalbrowser")]).token_type, None);
        let with_password = of(&[("SNOWFLAKE_HOST", "http://me:pass@a.b:1/")]);
        assert_eq!(with_password.shown_url(), "http://a.b:1");
        assert!(!format!("{with_password:?}").contains("pass"));
    }
}
