//! What libraries say by the names of their own types, in words.

/// What the TLS library calls what is wrong with a certificate, and what that is.
const OF_TLS: [(&str, &str); 3] = [
    (
        "CaUsedAsEndEntity",
        "the server shows the certificate of a CA as its own; it needs one that is signed by that CA, or \
         self-signed without being a CA's",
    ),
    ("EndEntityUsedAsCa", "it is signed by a certificate that is no CA's"),
    ("UnsupportedCertVersion", "it is no X.509 certificate of version 3; its owner must make it anew"),
];

/// `text` with such a name said in words, as whole as the library wraps it.
pub(crate) fn of_tls(text: &str) -> String {
    for (name, words) in OF_TLS {
        for wrapped in [format!("Other(OtherError({name}))"), name.to_owned()] {
            if text.contains(&wrapped) {
                return text.replace(&wrapped, words);
            }
        }
    }
    text.to_owned()
}
