//! Paths that no leased key may be sent to: those that make or show credentials, and the user's own.
//!
//! Servers read one path in several ways: they decode it once or twice, ignore case, empty segments and
//! `;parameters`, take `\` for `/`, resolve dot segments after decoding. So a path is judged in each of
//! these readings, and is denied if one is; what is sent stays as it came.

use std::borrow::Cow;

use crate::config::{PathPattern, Provider};
use crate::model::{Code, Fault};

/// Refuses a path of `provider` that is denied: as the provider sees it (`full`), and as the caller named
/// it behind the base URL (`relative`).
pub(super) fn refuse_denied(provider: &Provider, full: &str, relative: &str) -> Result<(), Fault> {
    if provider.deny_paths.is_empty() {
        return Ok(());
    }
    let base = Reading::of(provider.base_url.path().as_bytes());
    for path in [full].into_iter().chain((full != relative).then_some(relative)) {
        let mut pattern = denied_as(provider, &base, path.as_bytes());
        if path.contains('%') {
            let decoded = [decoded_once(path.as_bytes()), decoded_fully(path.as_bytes())];
            pattern = pattern.or_else(|| decoded.iter().find_map(|path| denied_as(provider, &base, path)));
        }
        if let Some(pattern) = pattern {
            return Err(denied(provider, pattern));
        }
    }
    Ok(())
}

/// The pattern that denies a path as it stands, if one does.
fn denied_as<'p>(provider: &'p Provider, base: &Reading<'_>, path: &[u8]) -> Option<&'p PathPattern> {
    Reading::of(path).behind(base).find_map(|segments| denies(provider, segments))
}

/// The pattern that denies this reading; an exception counts for the very reading that it fits.
fn denies<'p>(provider: &'p Provider, segments: &[Cow<'_, [u8]>]) -> Option<&'p PathPattern> {
    let fits = |pattern: &&PathPattern| pattern.fits(segments);
    if provider.allow_paths.iter().any(|pattern| fits(&pattern)) {
        return None;
    }
    provider.deny_paths.iter().find(fits)
}

fn denied(provider: &Provider, pattern: &PathPattern) -> Fault {
    let name = &provider.name;
    Fault::new(
        Code::PathDenied,
        format!(
            "the path fits `{pattern}`, which is denied for `{name}` (such paths make or show credentials, which \
             would outlive the lease); if callers may use it, add to the configuration: \
             [providers.{name}] allow_paths = [\"{pattern}\"]"
        ),
    )
}

/// A path as some server reads it: segments in lower case.
struct Reading<'p>(Vec<Cow<'p, [u8]>>);

impl<'p> Reading<'p> {
    fn of(path: &'p [u8]) -> Self {
        let mut segments: Vec<Cow<'p, [u8]>> = Vec::new();
        let mut rest = path;
        loop {
            let plain = rest.iter().take_while(|byte| is_plain(**byte)).count();
            let within = |byte: &&u8| !matches!(**byte, b'/' | b'\\' | b'?' | b'#');
            let more = rest[plain..].iter().take_while(within).count();
            let (segment, behind) = rest.split_at(plain + more);
            let name = if more == 0 { Cow::Borrowed(segment) } else { name_of(segment) };
            match &*name {
                b"" | b"." => {}
                b".." => {
                    segments.pop();
                }
                _ => segments.push(name),
            }
            match behind {
                [b'/' | b'\\', behind @ ..] => rest = behind,
                // What a decoded `?` or `#` begins is no path any more for who reads it again.
                _ => return Self(segments),
            }
        }
    }

    /// This path, and what is left of it without each part of the base URL's path that it begins with: a
    /// base URL may hold some of what patterns name, or a gateway's prefix before it.
    fn behind<'a>(&'a self, base: &Reading<'_>) -> impl Iterator<Item = &'a [Cow<'p, [u8]>]> {
        let shared = self.0.iter().zip(&base.0).take_while(|(own, its)| own == its).count();
        (0..=shared).map(|cut| &self.0[cut..])
    }
}

/// Whether every server reads a byte as it is; most paths are made of such.
fn is_plain(byte: u8) -> bool {
    matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'-' | b'_' | b'.')
}

/// A segment without its parameters, in lower case, and without blanks and control characters: some cut those off
/// or skip them.
fn name_of(segment: &[u8]) -> Cow<'_, [u8]> {
    let name = segment.split(|byte| *byte == b';').next().unwrap_or_default();
    let visible = name.iter().filter(|byte| **byte > b' ' && **byte != 0x7f);
    visible.map(u8::to_ascii_lowercase).collect()
}

fn hex(byte: Option<&u8>) -> Option<u8> {
    char::from(*byte?).to_digit(16).and_then(|digit| u8::try_from(digit).ok())
}

fn decoded_once(path: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(path.len());
    let mut at = 0;
    while let Some(&byte) = path.get(at) {
        if let (b'%', Some(high), Some(low)) = (byte, hex(path.get(at + 1)), hex(path.get(at + 2))) {
            out.push(high * 16 + low);
            at += 3;
        } else {
            out.push(byte);
            at += 1;
        }
    }
    out
}

/// In one pass, however deep the encoding: what a decoded byte completes is decoded at once.
fn decoded_fully(path: &[u8]) -> Vec<u8> {
    let mut out: Vec<u8> = Vec::with_capacity(path.len());
    for byte in path {
        out.push(*byte);
        while let [.., b'%', high, low] = out.as_slice()
            && let (Some(high), Some(low)) = (hex(Some(high)), hex(Some(low)))
        {
            out.truncate(out.len() - 3);
            out.push(high * 16 + low);
        }
    }
    out
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a test that fails may panic
mod tests {
    use super::*;
    use crate::config::catalogue::{RawProvider, builtin};
    use crate::model::ProviderName;

    fn provider(toml: &str) -> Provider {
        let name = ProviderName::parse("openai").unwrap();
        let raw: RawProvider = toml::from_str(toml).unwrap();
        raw.compile(&name, Some(&builtin()["openai"])).unwrap()
    }

    fn is_denied(provider: &Provider, full: &str, relative: &str) -> bool {
        refuse_denied(provider, full, relative).is_err()
    }

    #[test]
    fn a_denied_path_is_seen_in_every_reading() {
        let openai = provider("");
        for path in [
            "/v1/realtime/client_secrets",
            "/v1/realtime/client_secrets/",
            "/v1//realtime///client_secrets",
            "/V1/Realtime/CLIENT_SECRETS",
            "/v1/realtime/client%5Fsecrets",
            "/v1/realtime/client%5fsecrets%2f",
            "/v1/realtime%2Fclient_secrets",
            "/v1/realtime/client%255Fsecrets",
            "/v1/realtime/client%25255Fsecrets",
            "/v1/realtime/client%%35Fsecrets",
            "/v1/realtime/client_secrets;x=1",
            "/v1;a/realtime;b/client_secrets;c",
            "/v1/realtime\\client_secrets",
            "/v1/realtime/client_secrets%00",
            "/v1/realtime/client_secrets%20",
            "/v1/realtime/client_secrets%3Fx",
            "/v1/x/%252e%252e/realtime/client_secrets",
            "/v1/organization/projects/a%252Fb/api_keys",
            "/v1/organization/projects/p/service_accounts/s",
        ] {
            assert!(is_denied(&openai, path, path), "{path}");
        }
        for path in [
            "/v1/realtime",
            "/v1/realtime/client_secrets_of_mine",
            "/v1/chat/completions",
            "/",
            "/v1/models/%",
        ] {
            assert!(!is_denied(&openai, path, path), "{path}");
        }
    }

    /// By provider, what mints or shows credentials: nothing is lent for it.
    const MINTS: [(&str, &[&str]); 10] = [
        (
            "openai",
            &[
                "/v1/organization/admin_api_keys",
                "/v1/organization/projects/p/api_keys/k",
                "/v1/organization/projects/p/service_accounts",
                "/v1/realtime/client_secrets",
                "/v1/realtime/sessions",
                "/v1/realtime/transcription_sessions",
                "/v1/chatkit/sessions",
                "/v1/webhook_endpoints/w/rotate_secret",
            ],
        ),
        (
            "anthropic",
            &["/v1/organizations/api_keys/k", "/v1/oauth/token", "/api/oauth/claude_cli/create_api_key"],
        ),
        (
            "gemini",
            &["/v1alpha/auth_tokens", "/batch", "/$rpc/google.ai.generativelanguage.v1.AuthTokenService"],
        ),
        (
            "azure-openai",
            &["/openai/realtimeapi/sessions", "/openai/v1/realtime/client_secrets", "/sts/v1.0/issueToken"],
        ),
        ("openrouter", &["/api/v1/keys", "/api/v1/auth/keys", "/api/v1/byok"]),
        ("xai", &["/v1/realtime/client_secrets", "/v1/realtime/sessions"]),
        ("fireworks", &["/v1/accounts/a/users/u/apiKeys", "/v1/accounts/a/secrets/s"]),
        ("perplexity", &["/generate_auth_token", "/revoke_auth_token"]),
        (
            "elevenlabs",
            &["/v1/single-use-token/realtime_scribe", "/v1/service-accounts/s/api-keys", "/v1/user"],
        ),
        ("huggingface", &["/oauth/token"]),
    ];

    #[test]
    fn the_catalogue_denies_each_providers_paths_that_mint_keys_and_says_where_there_are_none() {
        for (name, paths) in MINTS {
            for path in paths {
                assert!(is_denied(&builtin()[name], path, path), "{name} {path}");
            }
            assert!(!is_denied(&builtin()[name], "/v1/models", "/v1/models"), "{name}");
        }
        // One more that shows a secret; the others have no such path.
        let without = builtin().values().filter(|provider| provider.deny_paths.is_empty());
        let without: Vec<_> = without.map(|provider| provider.name.as_str()).collect();
        assert_eq!(without, ["cohere", "deepseek", "groq", "mistral", "runway", "together"]);
        assert!(is_denied(
            &builtin()["replicate"],
            "/v1/webhooks/default/secret",
            "/v1/webhooks/default/secret"
        ));
    }

    #[test]
    fn a_base_urls_path_hides_nothing() {
        for (base, full, relative) in [
            ("https://h/v1", "/v1/realtime/client_secrets", "/realtime/client_secrets"),
            ("https://h/gate", "/gate/v1/realtime/client_secrets", "/v1/realtime/client_secrets"),
            ("https://h/gate/v1", "/gate/v1/realtime/client_secrets", "/realtime/client_secrets"),
        ] {
            let gated = provider(&format!("base_url = '{base}'"));
            assert!(is_denied(&gated, full, relative), "{base}");
            assert!(!is_denied(&gated, &full.replace("client_secrets", "calls"), "/x"), "{base}");
        }
    }

    #[test]
    fn an_exception_counts_for_the_reading_that_it_fits_and_no_other() {
        let open = provider("allow_paths = ['/v1/realtime/client_secrets', '/v1/a/**']");
        assert!(!is_denied(&open, "/v1/realtime/client_secrets", "/v1/realtime/client_secrets"));
        assert!(is_denied(&open, "/v1/realtime/sessions", "/v1/realtime/sessions"));
        // One server would take this for a path below /v1/a, another for a denied one.
        let twisted = "/v1/a/%2e%2e/realtime/sessions";
        assert!(is_denied(&open, twisted, twisted));
    }

    #[test]
    fn a_long_chain_of_encodings_is_decoded_in_one_pass() {
        let deep = format!("%{}41", "25".repeat(30_000));
        assert_eq!(decoded_fully(deep.as_bytes()), b"A");
        assert_eq!(decoded_fully(b"%4%31%zz%"), b"A%zz%");
    }
}
