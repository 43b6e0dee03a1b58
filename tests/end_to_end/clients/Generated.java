// The only annotation of the generated code that the generator's archive lacks.
package javax.annotation;
public @interface Generated { String value(); String date() default ""; String comments() default ""; }
