Todos los seres humanos nacen libres e iguales en dignidad y derechos.
Dotados como están de razón y conciencia, deben comportarse fraternalmente los unos con los otros.
Todo individuo tiene derecho a la vida, a la libertad y a la seguridad de su persona.
Nadie estará sometido a esclavitud ni a servidumbre; la esclavitud y la trata de esclavos están prohibidas en todas sus formas.
Nadie será sometido a torturas ni a penas o tratos crueles, inhumanos o degradantes.
Todo ser humano tiene derecho, en todas partes, al reconocimiento de su personalidad jurídica.
Nadie podrá ser arbitrariamente detenido, preso ni desterrado.
Toda persona tiene derecho a circular libremente y a elegir su residencia en el territorio de un Estado.
Toda persona tiene derecho a salir de cualquier país, incluso del propio, y a regresar a su país.
Toda persona tiene derecho a una nacionalidad.
A nadie se privará arbitrariamente de su nacionalidad ni del derecho a cambiar de nacionalidad.
Sólo mediante libre y pleno consentimiento de los futuros esposos podrá contraerse el matrimonio.
La familia es el elemento natural y fundamental de la sociedad y tiene derecho a la protección de la sociedad y del Estado.
Toda persona tiene derecho a la propiedad, individual y colectivamente.
Nadie será privado arbitrariamente de su propiedad.
Toda persona tiene derecho a la libertad de reunión y de asociación pacíficas.
Nadie podrá ser obligado a pertenecer a una asociación.
Toda persona tiene derecho a participar en el gobierno de su país, directamente o por medio de representantes libremente escogidos.
Toda persona tiene el derecho de acceso, en condiciones de igualdad, a las funciones públicas de su país.
Toda persona tiene derecho, sin discriminación alguna, a igual salario por trabajo igual.
Toda persona tiene derecho a fundar sindicatos y a sindicarse para la defensa de sus intereses.
Toda persona tiene derecho al descanso, al disfrute del tiempo libre, a una limitación razonable de la duración del trabajo y a vacaciones periódicas pagadas.
La maternidad y la infancia tienen derecho a cuidados y asistencia especiales.
Toda persona tiene derecho a la educación.
