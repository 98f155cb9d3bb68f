//! Who may ask: basic authentication against bcrypt hashes.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::header::{AUTHORIZATION, WWW_AUTHENTICATE};
use axum::http::{HeaderMap, StatusCode};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use tokio::sync::Semaphore;

/// Names, and the hashes of their passwords.
#[derive(Debug)]
pub struct Users {
    hashes: BTreeMap<String, String>,
    /// A hash takes tens of milliseconds: who tries many passwords waits, and takes one processor at most.
    one_at_a_time: Semaphore,
}

impl Users {
    /// Those of a web config.
    pub fn new(hashes: BTreeMap<String, String>) -> Self {
        Self {
            hashes,
            one_at_a_time: Semaphore::new(1),
        }
    }

    /// False where everybody may ask.
    pub fn are_named(&self) -> bool {
        !self.hashes.is_empty()
    }

    async fn know(&self, headers: &HeaderMap) -> bool {
        let Some((name, password)) = credentials(headers) else {
            return false;
        };
        let known = self.hashes.get(&name);
        // An unknown name takes as long as a wrong password.
        let Some(hash) = known.or_else(|| self.hashes.values().next()).cloned() else {
            return false;
        };
        let Ok(_turn) = self.one_at_a_time.acquire().await else {
            return false;
        };
        let fits = tokio::task::spawn_blocking(move || bcrypt::verify(password, &hash));
        matches!(fits.await, Ok(Ok(true))) && known.is_some()
    }
}

/// Lets a request pass if it names one of `users` and knows the password.
pub async fn check(State(users): State<Arc<Users>>, request: Request, next: Next) -> Response {
    if users.know(request.headers()).await {
        return next.run(request).await;
    }
    let wanted = [(WWW_AUTHENTICATE, "Basic realm=\"cmt\"")];
    (StatusCode::UNAUTHORIZED, wanted, "unauthorized\n").into_response()
}

fn credentials(headers: &HeaderMap) -> Option<(String, String)> {
    let (scheme, encoded) = headers.get(AUTHORIZATION)?.to_str().ok()?.split_once(' ')?;
    if !scheme.eq_ignore_ascii_case("basic") {
        return None;
    }
    let pair = String::from_utf8(STANDARD.decode(encoded.trim()).ok()?).ok()?;
    let (name, password) = pair.split_once(':')?;
    Some((name.to_owned(), password.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(value: &str) -> HeaderMap {
        let value = value.parse().expect("a header's value");
        HeaderMap::from_iter([(AUTHORIZATION, value)])
    }

    #[test]
    fn credentials_are_read_and_nonsense_is_none() {
        let pair = |name: &str, password: &str| Some((name.to_owned(), password.to_owned()));
        let good = headers("Basic YWxpY2U6b3BlbjpzZXNhbWU=");
        assert_eq!(credentials(&good), pair("alice", "open:sesame"));
        for value in [
            "",
            "Basic",
            "Basic !",
            "Bearer YWxpY2U6eA==",
            "Basic YWxpY2U=",
            "Basic //8=",
        ] {
            assert_eq!(credentials(&headers(value)), None, "{value}");
        }
        assert_eq!(credentials(&HeaderMap::new()), None);
    }

    #[tokio::test]
    async fn only_the_right_password_of_a_known_name_passes() {
        let hash = bcrypt::hash("open sesame", 4).expect("a hash");
        let users = Users::new([("alice".to_owned(), hash)].into());
        for (pair, passes) in [
            ("alice:open sesame", true),
            ("alice:open", false),
            ("bob:open sesame", false),
            (":", false),
        ] {
            let value = format!("Basic {}", STANDARD.encode(pair));
            assert_eq!(users.know(&headers(&value)).await, passes, "{pair}");
        }
        assert!(
            !Users::new(BTreeMap::new())
                .know(&headers("Basic Og=="))
                .await
        );
    }
}
